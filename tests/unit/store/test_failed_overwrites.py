"""Leftovers of a dead save or a failed disk next to a checkpoint; files of other programs are kept."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.file_content import content
from tests.support.killed_saves import (
    OF_KILLED_SAVES,
    assert_holds,
    dead_attempt,
    names,
    of_another_boot,
    save_under,
)
from tests.support.overwritten import RUN, OwnFiles, begin_run, damage

pytestmark = OF_KILLED_SAVES
OLD, NEW, NEXT = ({"w": np.arange(length)} for length in (4, 5, 6))


def without_manifest(checkpoint: Path) -> None:
    """Save a checkpoint without a manifest, and a file that does not belong to it."""
    jct.save(checkpoint, OLD)
    (checkpoint / "configs").mkdir()
    (checkpoint / "configs" / "a.yaml").write_text("mine")
    (checkpoint / "manifest.json").unlink()


def test_name_of_kept_directory_is_synced_before_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    sync, rename = LocalBackend.sync, LocalBackend.rename

    def noted_sync(self: LocalBackend, path: str) -> None:
        sync(self, path)
        happened.append(f"synced {path}")

    def noted_rename(self: LocalBackend, source: str, target: str) -> None:
        rename(self, source, target)
        happened.append(f"renamed to {target}")

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            happened.append(f"logged {record.getMessage()}")

    without_manifest(tmp_path / "c")
    monkeypatch.setattr(LocalBackend, "sync", noted_sync)
    monkeypatch.setattr(LocalBackend, "rename", noted_rename)
    logger, recorder = logging.getLogger("jaxckpt_train"), Recorder(logging.WARNING)
    logger.addHandler(recorder)
    try:
        jct.save(tmp_path / "c", NEW, overwrite=True)
    finally:
        logger.removeHandler(recorder)
    kept = tmp_path / "c.replaced-1"
    renamed = happened.index(f"renamed to {kept}")
    assert happened[renamed + 1] == f"synced {tmp_path}"
    assert f"everything is now in {kept}." in happened[renamed + 2]


def test_undone_rename_loses_nothing(tmp_path: Path) -> None:
    without_manifest(tmp_path / "c")
    before = content(tmp_path / "c")
    jct.save(tmp_path / "c", NEW, overwrite=True)
    of_another_boot((tmp_path / "c.replaced-1").rename(dead_attempt(tmp_path / "c")))
    jct.save(tmp_path / "c", NEXT, overwrite=True)
    assert content(tmp_path / "c.replaced-1") == before
    assert names(tmp_path) == ["c", "c.replaced-1"]


@pytest.mark.parametrize("refused", ["manifest.json", "run"])
def test_unreadable_side_name_fails_the_save(tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_list = LocalBackend.open, LocalBackend.list
    checkpoint, aside = tmp_path / "c", tmp_path / ".c.aside"

    def refuse(path: str) -> None:
        if path == str(aside / refused):
            raise jct.StorageError(errno.EIO, "refused", path)

    def refusing_open(self: LocalBackend, directory: str, name: str, *, direct: Any) -> Any:
        refuse(f"{directory}/{name}")
        return real_open(self, directory, name, direct=direct)

    def refusing_list(self: LocalBackend, path: str) -> Any:
        refuse(path)
        return real_list(self, path)

    monkeypatch.setattr(local, "exchange_names", lambda *_: False)  # as on a system that cannot swap two names
    jct.save(checkpoint, NEW)
    save_under(aside, {"state": OLD})
    begin_run(aside / "run")
    before = content(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(LocalBackend, "open", refusing_open)
        failing.setattr(LocalBackend, "list", refusing_list)
        with pytest.raises(jct.StorageError, match=r"\.c\.aside exists"):
            jct.save(checkpoint, NEXT, overwrite=True)
    assert content(tmp_path) == before
    jct.save(checkpoint, NEXT, overwrite=True)  # the disk responds again
    assert_holds(checkpoint, NEXT)
    assert_holds(tmp_path / "c.replaced-1" / "run" / "step-0000000001", RUN)
    assert names(tmp_path) == ["c", "c.replaced-1"]


def test_own_folders_in_damaged_checkpoint_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = {"state": NEW, "own": OwnFiles()}
    jct.save_checkpointables(tmp_path / "c", parts)
    damage(tmp_path / "c")
    before = content(tmp_path / "c")
    for _ in range(2):
        jct.save_checkpointables(tmp_path / "c", parts, overwrite=True)
        assert content(tmp_path / "c.replaced-1") == before
        assert names(tmp_path) == ["c", "c.replaced-1"]
    (message,) = caplog.messages
    assert ": own. " in message
    begin_run(tmp_path / "c" / "own" / "inner" / "run")
    damage(tmp_path / "c")
    with pytest.raises(jct.CheckpointExistsError, match=r"other files: own; move them"):
        jct.save(tmp_path / "c", NEXT, overwrite=True)
    assert_holds(tmp_path / "c" / "own" / "inner" / "run" / "step-0000000001", RUN)


@pytest.mark.parametrize("read", [jct.load, jct.metadata, jct.verify])
def test_each_candidate_folder_is_inspected_at_most_twice(
    tmp_path: Path, read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspections: Counter[str] = Counter()
    real_open, real_list = LocalBackend.open, LocalBackend.list

    def counted_open(self: LocalBackend, directory: str, name: str, *, direct: Any) -> Any:
        inspections[directory] += 1
        return real_open(self, directory, name, direct=direct)

    def counted_list(self: LocalBackend, path: str) -> Any:
        inspections[path] += 1
        return real_list(self, path)

    folders = [tmp_path / f"experiment-{number}" for number in range(20)]
    for folder in folders:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr(LocalBackend, "open", counted_open)
    monkeypatch.setattr(LocalBackend, "list", counted_list)
    with pytest.raises(jct.NotACheckpointError, match=r"found experiment-0, .*, \.\.\."):
        read(tmp_path)
    assert all(1 <= inspections[str(folder)] <= 2 for folder in folders), inspections


@pytest.mark.parametrize("gone", [["COMMIT"], ["COMMIT", "manifest.json"]], ids="-".join)
def test_attempt_removed_by_another_process_is_not_kept(
    tmp_path: Path, gone: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, listed = tmp_path / "c", list[str]()
    left, real = dead_attempt(checkpoint), LocalBackend.list

    def list_during_removal(self: LocalBackend, path: str) -> Any:
        listed.append(path)
        if listed.count(str(left)) == 2:  # the first call asks whether it is an attempt
            for name in gone:
                (left / name).unlink(missing_ok=True)
        return real(self, path)

    jct.save(checkpoint, OLD)
    save_under(left, {"state": OLD, "own": OwnFiles()})
    monkeypatch.setattr(LocalBackend, "list", list_during_removal)
    jct.save(checkpoint, NEW, overwrite=True)
    assert listed.count(str(left)) >= 2
    assert "c.replaced-1" not in names(tmp_path)
    jct.save(checkpoint, NEXT, overwrite=True)  # in case the other process died
    assert names(tmp_path) == ["c"]
    assert caplog.messages == []


def test_two_processes_keep_one_leftover_without_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "c"
    left, real = dead_attempt(checkpoint), LocalBackend.rename

    def rename_after_the_other(self: LocalBackend, source: str, target: str) -> None:
        if source == str(left) and left.exists():
            real(self, source, target)
        real(self, source, target)

    jct.save(checkpoint, OLD)
    save_under(left, {"state": OLD})
    (left / "notes.txt").write_text("mine")
    monkeypatch.setattr(LocalBackend, "rename", rename_after_the_other)
    jct.save(checkpoint, NEW, overwrite=True)
    assert (tmp_path / "c.replaced-1" / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["c", "c.replaced-1"]
    assert not any("could not be removed" in message for message in caplog.messages)
