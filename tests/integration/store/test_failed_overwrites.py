"""Leftovers of a killed save next to a checkpoint: files of other programs are never removed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends import local_names
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.removal import remove_dead_attempts
from tests.support.file_content import content
from tests.support.forking import Tell, forked
from tests.support.killed_saves import (
    OF_KILLED_SAVES,
    assert_holds,
    dead_attempt,
    die,
    killed,
    killed_after_the_exchange,
    names,
    save_under,
)
from tests.support.overwritten import RUN, OwnFiles, begin_run

pytestmark = OF_KILLED_SAVES
OLD, NEW, NEXT = ({"w": np.arange(length)} for length in (4, 5, 6))
MEMORY_BYTES = 600 << 20
GROWN_BYTES = 1 << 30


def without_manifest(checkpoint: Path) -> None:
    """Save a checkpoint without a manifest, and a file that does not belong to it."""
    jct.save(checkpoint, OLD)
    (checkpoint / "configs").mkdir()
    (checkpoint / "configs" / "a.yaml").write_text("mine")
    (checkpoint / "manifest.json").unlink()


@pytest.mark.parametrize("is_empty", [False, True])
def test_kill_keeps_content_of_checkpoint_without_manifest(tmp_path: Path, is_empty: bool) -> None:
    without_manifest(tmp_path / "c")
    if is_empty:
        (tmp_path / "c" / "manifest.json").touch()
    before = content(tmp_path / "c")
    killed_after_the_exchange(tmp_path / "c", NEW)
    for _ in range(2):
        jct.save(tmp_path / "c", NEXT, overwrite=True)
        assert_holds(tmp_path / "c", NEXT)
        assert content(tmp_path / "c.replaced-1") == before
        assert names(tmp_path) == ["c", "c.replaced-1"]


@pytest.mark.parametrize("is_run", [False, True])
def test_run_that_took_the_name_survives_kill(tmp_path: Path, is_run: bool) -> None:
    checkpoint = tmp_path / "c"

    def take_the_name() -> None:
        checkpoint.rename(tmp_path / "elsewhere")
        begin_run(checkpoint)
        if not is_run:
            shutil.rmtree(checkpoint / LOCK_NAME)
            (checkpoint / HISTORY_NAME).unlink()

    jct.save(checkpoint, OLD)
    killed_after_the_exchange(checkpoint, NEW, take_the_name)
    for _ in range(2):
        jct.save(checkpoint, NEXT, overwrite=True)
        assert_holds(checkpoint, NEXT)
        assert_holds(tmp_path / "c.replaced-1" / "step-0000000001", RUN)
        assert names(tmp_path) == ["c", "c.replaced-1", "elsewhere"]


@pytest.mark.parametrize("where", [lambda checkpoint: checkpoint, dead_attempt], ids=["replaced", "left"])
def test_oversized_manifest_needs_no_memory(tmp_path: Path, where: Callable[[Path], Path]) -> None:
    checkpoint = tmp_path / "c"
    jct.save(checkpoint, OLD)
    if (grown := where(checkpoint)) != checkpoint:
        save_under(grown, {"state": OLD})
    os.truncate(grown / "manifest.json", GROWN_BYTES)  # a sparse file, which takes no space on the disk

    def save(tell: Tell) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        with pytest.raises(MemoryError):
            bytearray(GROWN_BYTES)
        jct.save(checkpoint, NEW, overwrite=True)

    assert forked(save) == ([], 0)
    assert_holds(checkpoint, NEW)
    assert names(tmp_path) == ["c"]


def test_two_processes_remove_one_leftover_without_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "c"
    left = dead_attempt(checkpoint)
    real = LocalBackend.list

    def list_after_the_other(self: LocalBackend, path: str) -> Any:
        if path == str(left) and left.exists():
            monkeypatch.setattr(LocalBackend, "list", real)
            assert forked(lambda tell: remove_dead_attempts(LocalBackend(), str(checkpoint))) == ([], 0)
            assert not left.exists()
        return real(self, path)

    jct.save(checkpoint, OLD)
    (left / "state").mkdir(parents=True)
    monkeypatch.setattr(LocalBackend, "list", list_after_the_other)
    jct.save(checkpoint, NEW, overwrite=True)
    assert LocalBackend.list is real, "the other process did not run"
    assert caplog.messages == []
    assert names(tmp_path) == ["c"]
    assert_holds(checkpoint, NEW)


def die_at(name: str, where: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Kill this process after the first call of a function of `os` with a path that ends with `where`."""

    def arrange(patch: pytest.MonkeyPatch) -> None:
        real = getattr(os, name)

        def call(path: str, *args: Any, **options: Any) -> Any:
            result = real(path, *args, **options)
            if path.endswith(where):
                die()
            return result

        patch.setattr(os, name, call)

    return arrange


def refuse_to_sync_directories(patch: pytest.MonkeyPatch) -> None:
    sync = LocalBackend.sync

    def refuse(self: LocalBackend, path: str) -> None:
        if ".tmp-" in path and os.path.isdir(path):
            raise jct.StorageError(errno.EIO, "cannot sync", path)
        sync(self, path)

    patch.setattr(LocalBackend, "sync", refuse)


@pytest.mark.parametrize("durability", ["full", "none"])
@pytest.mark.parametrize("name", ["c", "two\nlines"])
@pytest.mark.parametrize(
    "faults",
    [[die_at("open", "/COMMIT")], [refuse_to_sync_directories, die_at("unlink", "manifest.json")]],
    ids=["before the first byte of COMMIT", "in the abort"],
)
def test_killed_attempt_with_own_files_is_removed(
    tmp_path: Path, faults: list[Any], name: str, durability: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parts, settings = {"state": OLD, "own": OwnFiles()}, jct.StoreSettings(durability=durability)
    if refuse_to_sync_directories in faults:
        settings = jct.StoreSettings()  # otherwise no directory is synced

    def work(patch: pytest.MonkeyPatch) -> None:
        scan_entries = local_names.scan_entries  # the order is arbitrary: list the manifest first
        patch.setattr(
            local_names,
            "scan_entries",
            lambda path: sorted(scan_entries(path), key=lambda each: each.name != "manifest.json"),
        )
        for arrange in faults:
            arrange(patch)
        jct.save_checkpointables(tmp_path / name, parts, overwrite=True, settings=settings)

    jct.save_checkpointables(tmp_path / name, parts, settings=settings)
    killed(work)
    assert len(names(tmp_path)) == 2
    jct.save_checkpointables(tmp_path / name, parts, overwrite=True, settings=settings)
    assert names(tmp_path) == [name]
    assert caplog.messages == []
