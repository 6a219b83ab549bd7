"""A disk that can be read but does not answer writes: saving a checkpoint to it does not block for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.same_trees import assert_same

pytestmark = pytest.mark.timeout(120)
STATE = {"w": np.arange(1000.0)}


class Stuck(LocalBackend):
    """Makes no directory for an attempt (or for its parents) until `go` is set."""

    def __init__(self, parents: bool = False) -> None:
        self.go, self.removed = threading.Event(), threading.Event()
        self._parents = parents
        self.reached: Callable[[], object] = lambda: None

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        if parents == self._parents and not self.go.is_set():
            self.reached()
            assert self.go.wait(60)
        super().make_directory(path, parents=parents, sync=sync)

    def remove(self, path: str) -> None:
        super().remove(path)
        self.removed.set()


@pytest.fixture(params=["the attempt", "its parents"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck(request.param == "its parents")
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: stuck)
    yield stuck
    stuck.go.set()


@pytest.mark.parametrize("save", [jct.save, jct.save_async], ids=["save", "save_async"])
def test_save_to_stuck_disk_raises(disk: Stuck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", 0.1)
    monkeypatch.setattr("jaxckpt_train.store.timeouts.POLL_S", 0.05)
    with pytest.raises(jct.CheckpointTimeoutError, match=r"runs/c: no progress for"):
        save(tmp_path / "runs" / "c", STATE)
    disk.go.set()
    assert disk.removed.wait(30)
    assert os.listdir(tmp_path / "runs") == []
    monkeypatch.undo()
    jct.save(tmp_path / "runs" / "c", STATE)
    assert_same(jct.load(tmp_path / "runs" / "c"), STATE)


def test_interrupt_on_stuck_disk_leaves_nothing(disk: Stuck, tmp_path: Path) -> None:
    main = threading.main_thread().ident or 0
    disk.reached = lambda: signal.pthread_kill(main, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        jct.save(tmp_path / "runs" / "c", STATE)
    disk.go.set()
    assert disk.removed.wait(30)
    assert os.listdir(tmp_path / "runs") == []


def test_wrong_path_is_refused_by_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(jct.StorageError, match="is where a directory is expected"):
        jct.save_async(tmp_path / "file" / "c", STATE)
