"""An overwrite removes no file in the directory of a checkpoint that is no part of the checkpoint."""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.removal import remove_dead_attempts, untracked_files
from jaxckpt_train.store.transaction import Transaction
from tests.support.file_content import content
from tests.support.killed_saves import OF_KILLED_SAVES, dead_attempt, names, save_under
from tests.support.overwritten import RUN, OwnFiles, begin_run, damage

pytestmark = OF_KILLED_SAVES
OLD, NEW = {"w": np.arange(4)}, {"w": np.arange(5)}


def make_newer(checkpoint: Path) -> None:
    for name in ("COMMIT", "manifest.json"):
        text = (checkpoint / name).read_text()
        (checkpoint / name).write_text(
            text.replace('"format_version":1', '"format_version":2').replace('"parts":', '"pieces":')
        )


def lose(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


@pytest.mark.parametrize("fault", [damage, make_newer, lose])
def test_run_inside_unreadable_checkpoint_is_kept(tmp_path: Path, fault: Callable[[Path], None]) -> None:
    jct.save(tmp_path / "c", OLD)
    begin_run(tmp_path / "c" / "run")
    fault(tmp_path / "c")
    before = content(tmp_path)
    with pytest.raises(jct.CheckpointExistsError, match=r"other files: run; move them"):
        jct.save(tmp_path / "c", NEW, overwrite=True)
    assert content(tmp_path) == before
    shutil.move(tmp_path / "c" / "run", tmp_path / "run")
    jct.save(tmp_path / "c", NEW, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"]
    assert np.array_equal(jct.load(tmp_path / "c")["w"], NEW["w"])


def test_unlistable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", OLD)
    begin_run(tmp_path / "c" / "run")
    before, real = content(tmp_path), LocalBackend.open

    def refuse(self: LocalBackend, directory: str, name: str, *, direct: Any) -> Any:
        if name == "manifest.json":
            raise jct.StorageError(errno.EIO, "cannot open the file", f"{directory}/{name}")
        return real(self, directory, name, direct=direct)

    monkeypatch.setattr(LocalBackend, "open", refuse)
    with pytest.raises(jct.StorageError, match="cannot open the file"):
        jct.save(tmp_path / "c", NEW, overwrite=True)
    assert content(tmp_path) == before


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


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("place", ["run", "state/run"])
def test_run_begun_during_overwrite_is_kept(
    tmp_path: Path,
    place: str,
    swaps: bool,
    while_it_is_written: Callable[[Callable[[], None]], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not swaps:
        monkeypatch.setattr(local, "exchange_names", lambda *_: False)
    jct.save(tmp_path / "c", OLD)
    (tmp_path / "c.replaced-1").mkdir()
    while_it_is_written(lambda: begin_run(tmp_path / "c" / place))
    with caplog.at_level(logging.WARNING, logger="jaxckpt_train"):
        jct.save(tmp_path / "c", NEW, overwrite=True)
    kept = tmp_path / "c.replaced-2"
    assert re.search(rf"run.* is now in {re.escape(str(kept))}", caplog.text)
    for _ in range(2):  # no later save removes it
        assert np.array_equal(jct.load(tmp_path / "c")["w"], NEW["w"])
        assert np.array_equal(jct.load(kept)["w"], OLD["w"])
        assert np.array_equal(jct.load(kept / place / "step-0000000001")["w"], RUN["w"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.replaced-1", "c.replaced-2"]
        jct.save(tmp_path / "c", NEW, overwrite=True)


def test_own_files_inside_checkpointable_block_overwrite(tmp_path: Path) -> None:
    for _ in range(2):  # files of the checkpointable itself are replaced, also in folders
        jct.save_checkpointables(tmp_path / "c", {"state": OLD, "own": OwnFiles()}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "c" / "own" / "inner" / "notes.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(jct.CheckpointExistsError, match=r"other files: own/inner/notes.txt"):
        jct.save(tmp_path / "c", NEW, overwrite=True)
    assert content(tmp_path) == before


def test_own_files_in_damaged_checkpoint_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jct.save(tmp_path / "c", OLD)
    (tmp_path / "c" / "configs").mkdir()
    (tmp_path / "c" / "configs" / "a.yaml").write_text("mine")  # as an object might have written it
    damage(tmp_path / "c")
    jct.save(tmp_path / "c", NEW, overwrite=True)
    assert (tmp_path / "c.replaced-1" / "configs" / "a.yaml").read_text() == "mine"
    assert "configs" in caplog.text
    assert np.array_equal(jct.load(tmp_path / "c")["w"], NEW["w"])


@pytest.mark.parametrize("where", [dead_attempt, lambda checkpoint: checkpoint.with_name(".c.aside")])
def test_killed_overwrite_keeps_run_inside(
    tmp_path: Path, where: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    left = where(tmp_path / "c")
    jct.save(tmp_path / "c", NEW)
    save_under(left, {"state": OLD})
    remove_dead_attempts(LocalBackend(), str(tmp_path / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    save_under(left, {"state": OLD})
    begin_run(left / "run")
    remove_dead_attempts(LocalBackend(), str(tmp_path / "c"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.replaced-1"]
    assert np.array_equal(jct.load(tmp_path / "c.replaced-1" / "run" / "step-0000000001")["w"], RUN["w"])
    assert "found" not in caplog.text
    assert str(tmp_path / "c.replaced-1") in caplog.text


def test_overwrite_check_reads_no_manifest(tmp_path: Path) -> None:
    class Unread(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            raise AssertionError(f"{directory}/{name} was opened")

    jct.save_checkpointables(tmp_path / "c", {"state": OLD, "more": jct.JsonValue(3)})
    assert list(untracked_files(Unread(), str(tmp_path / "c"), certain=False)) == []
    assert list(untracked_files(LocalBackend(), str(tmp_path / "c"), certain=True)) == []
    shutil.copytree(tmp_path / "c" / "state", tmp_path / "c" / "copy")  # only the manifest shows that it is foreign
    assert list(untracked_files(LocalBackend(), str(tmp_path / "c"), certain=True)) == ["copy"]


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("durability", ["full", "file", "none"])
@pytest.mark.parametrize("link", ["best", "best-of-all"])
def test_replaced_link_keeps_its_target(
    tmp_path: Path, link: str, durability: Any, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(local, "exchange_names", lambda *_: False)
    begin_run(tmp_path / "run")
    (tmp_path / "best").symlink_to("run/step-0000000001")
    (tmp_path / "best-of-all").symlink_to("best")
    before = content(tmp_path / "run")
    jct.save(tmp_path / link, NEW, overwrite=True, settings=jct.StoreSettings(durability=durability))
    assert not (tmp_path / link).is_symlink()
    assert np.array_equal(jct.load(tmp_path / link)["w"], NEW["w"])
    assert content(tmp_path / "run") == before
    assert names(tmp_path) == ["best", "best-of-all", "run"]


@pytest.mark.parametrize(
    "left", [b"", bytes(99), b'{"format":"jax' + bytes(99)], ids=["nothing", "zeros", "its first bytes"]
)
def test_truncated_checkpoint_is_not_taken_for_one(tmp_path: Path, left: bytes) -> None:
    jct.save(tmp_path / "c", OLD)
    for name in ("COMMIT", "manifest.json"):
        (tmp_path / "c" / name).write_bytes(left)
    jct.save(tmp_path / "c", NEW, overwrite=True)
    assert names(tmp_path) == ["c"]
