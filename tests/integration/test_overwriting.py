"""An overwrite removes no file in the directory of a checkpoint that is no part of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.transaction import Transaction
from tests.support.file_content import content
from tests.support.killed_saves import OF_KILLED_SAVES, killed_after_the_exchange, names
from tests.support.overwritten import begin_run

pytestmark = OF_KILLED_SAVES
OLD, NEW = {"w": np.arange(4)}, {"w": np.arange(5)}


@pytest.fixture
def while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function once, while the next save of this process writes."""

    def arrange(do: Callable[[], None]) -> None:
        real = Transaction.sync

        def sync_all(self: Transaction) -> None:
            monkeypatch.setattr(Transaction, "sync", real)
            do()
            real(self)

        monkeypatch.setattr(Transaction, "sync", sync_all)

    return arrange


def test_link_target_outlives_a_killed_overwrite(tmp_path: Path) -> None:
    begin_run(tmp_path / "run")
    (tmp_path / "best").symlink_to("run/step-0000000001")
    before = content(tmp_path / "run")
    killed_after_the_exchange(tmp_path / "best", NEW)
    jct.save(tmp_path / "best", OLD, overwrite=True)
    assert content(tmp_path / "run") == before
    assert names(tmp_path) == ["best", "run"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_file_created_during_overwrite_is_kept(
    tmp_path: Path, is_killed: bool, while_it_is_written: Callable[[Callable[[], None]], None]
) -> None:
    def take_the_name() -> None:
        (tmp_path / "c").rename(tmp_path / "elsewhere")
        (tmp_path / "c").write_text("mine")

    jct.save(tmp_path / "c", OLD)
    if is_killed:
        killed_after_the_exchange(tmp_path / "c", NEW, take_the_name)
    else:
        while_it_is_written(take_the_name)
    jct.save(tmp_path / "c", NEW, overwrite=True)
    assert (tmp_path / "c.replaced-1").read_text() == "mine"
    assert names(tmp_path) == ["c", "c.replaced-1", "elsewhere"]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize(
    "files",
    [
        {"COMMIT": "4f2a91c", "manifest.json": '{"name": "web app"}'},
        {"COMMIT": "", "manifest.json": "{}"},
        {"COMMIT": "x"},
    ],
    ids=lambda files: "-".join(map(str, files.values())),
)
def test_foreign_commit_and_manifest_files_are_kept(tmp_path: Path, files: dict[str, str], is_killed: bool) -> None:
    (tmp_path / "c" / "assets").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "c" / name).write_text(text)
    before = content(tmp_path / "c")
    if is_killed:
        killed_after_the_exchange(tmp_path / "c", OLD)
    jct.save(tmp_path / "c", NEW, overwrite=True)
    assert content(tmp_path / "c.replaced-1") == before
    assert names(tmp_path) == ["c", "c.replaced-1"]
    assert np.array_equal(jct.load(tmp_path / "c")["w"], NEW["w"])
