"""The side name of a checkpoint, `.NAME.aside`: leftovers of an exchange are removed, and other files are kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends import local
from tests.support.file_content import content
from tests.support.killed_saves import OF_KILLED_SAVES, assert_holds, dead_attempt, names

pytestmark = OF_KILLED_SAVES
OLD, NEW, NEXT = ({"w": np.arange(length)} for length in (4, 5, 6))


def file(aside: Path) -> None:
    aside.write_text("mine")


def folder(aside: Path) -> None:
    (aside / "photos").mkdir(parents=True)
    (aside / "photos" / "first.jpg").write_text("mine")


def file_in_it(aside: Path) -> None:
    aside.mkdir()
    (aside / "first.jpg").write_text("mine")


def manifest_of_another_program(aside: Path) -> None:
    aside.mkdir()
    (aside / "manifest.json").write_text('{"name": "web app"}')


def link(aside: Path) -> None:
    folder(aside.with_name("mine"))
    aside.symlink_to("mine")


@pytest.fixture(params=[True, False], ids=["swaps", "renames"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the system can swap two names."""
    if not request.param:
        monkeypatch.setattr(local, "exchange_names", lambda *_: False)
    return bool(request.param)


def others(directory: Path) -> dict[str, bytes | str]:
    """Return all files next to the checkpoint `c`, and the targets of links."""
    links = {path.name: str(path.readlink()) for path in directory.iterdir() if path.is_symlink()}
    return links | {name: data for name, data in content(directory).items() if not name.startswith("c/")}


@pytest.mark.parametrize("make", [file, folder, file_in_it, manifest_of_another_program, link])
def test_foreign_content_of_side_name_stays(tmp_path: Path, make: Callable[[Path], None], swaps: bool) -> None:
    jct.save(tmp_path / "c", OLD)
    make(tmp_path / ".c.aside")
    before = others(tmp_path)
    if swaps:
        jct.save(tmp_path / "c", NEW, overwrite=True)
        assert_holds(tmp_path / "c", NEW)
    else:
        with pytest.raises(jct.StorageError, match=r"\.c\.aside exists"):
            jct.save(tmp_path / "c", NEW, overwrite=True)
        assert_holds(tmp_path / "c", OLD)
    assert others(tmp_path) == before


def test_leftover_link_is_removed_without_its_target(tmp_path: Path) -> None:
    jct.save(tmp_path / "other", OLD)
    jct.save(tmp_path / "c", NEW)
    (tmp_path / ".c.aside").symlink_to("other")
    jct.save(tmp_path / "c", NEXT, overwrite=True)
    assert_holds(tmp_path / "other", OLD)
    assert names(tmp_path) == ["c", "other"]


@pytest.mark.parametrize("name", [".c.aside", ".two\nlines.aside", "of an attempt"])
def test_name_that_later_saves_clean_up_is_refused(tmp_path: Path, name: str) -> None:
    path = dead_attempt(tmp_path / "c") if name == "of an attempt" else tmp_path / name
    with pytest.raises(jct.SettingsError, match=rf"path: {re.escape(str(path))}: .*choose another name"):
        jct.save(path, OLD)
    assert names(tmp_path) == []
    for fine in ("c.aside", ".c.asides", ".c.tmp-1"):
        jct.save(tmp_path / fine, OLD)
