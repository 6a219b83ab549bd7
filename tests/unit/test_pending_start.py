"""The start of a save: after an error or an interrupt, the save is registered and ends, or it does not exist."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import pending
from jaxckpt_train.pending import PendingSave, start_save
from jaxckpt_train.run import saving
from jaxckpt_train.run.saving import StepSave
from tests.support.interrupts import interrupt_at


def under_way() -> set[pending.Save]:
    return pending.under_way


class Calls:
    """Records the calls for a save that is about to start."""

    def __init__(self) -> None:
        self.saves: list[PendingSave[Any] | None] = []
        self.undone: list[BaseException] = []
        self.worked = 0

    def work(self) -> int:
        self.worked += 1
        return 3

    def start(self) -> PendingSave[int]:
        return start_save("x", self.work, on_start=self.saves.append, undo=self.undone.append)


@pytest.fixture
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("_no_threads")
def test_save_without_a_thread_runs_on_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    before, calls, ran_on = set(under_way()), Calls(), list[threading.Thread]()
    save = start_save("x", lambda: ran_on.append(threading.current_thread()), on_start=calls.saves.append)
    assert (save.done(), ran_on, calls.saves) == (True, [threading.current_thread()], [save])
    assert under_way() == before
    assert "ulimit -u" in caplog.text


@pytest.mark.usefixtures("_no_threads")
def test_wait_raises_error_of_save_without_thread() -> None:
    before = set(under_way())
    save = start_save("x", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save.wait()
    assert under_way() == before


@pytest.mark.usefixtures("_no_threads")
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(3), SystemExit(0), SystemExit()])
def test_interrupt_of_save_without_thread_reaches_caller(stop: BaseException) -> None:
    def interrupted() -> None:
        raise stop

    before = set(under_way())
    with pytest.raises(type(stop)) as caught:
        start_save("x", interrupted)
    assert caught.value is stop
    assert under_way() == before


def join_saves() -> None:
    for thread in threading.enumerate():
        if thread.name == "jaxckpt-save" and thread.is_alive():  # else its start was interrupted
            thread.join(30)
            assert not thread.is_alive()


STARTING = (start_save, PendingSave.__init__, PendingSave._start, threading.Thread.__init__, threading.Thread.start)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no start message does not wait long for it."""
    monkeypatch.setattr(pending, "POLL_S", 0.01)
    monkeypatch.setattr(saving, "CALL_S", 0.01)


@pytest.mark.usefixtures("_impatient")
def test_interrupted_start_leaves_complete_save_or_none() -> None:
    before, ends = set(under_way()), set()
    for number in itertools.count(1):
        calls, is_interrupted = Calls(), True
        with interrupt_at(number, *STARTING) as seen, contextlib.suppress(KeyboardInterrupt):
            calls.start()
            is_interrupted = False
        join_saves()
        assert under_way() == before
        save = calls.saves[-1] if calls.saves else None
        assert calls.worked == (save is not None)
        assert [type(error) for error in calls.undone] in ([], [KeyboardInterrupt] * (save is None))
        if save is not None:
            assert save.outcome(0) is None
        ends.add((is_interrupted, save is not None, bool(calls.undone)))
        if seen[0] < number:
            break
    # Not announced; cancelled; continues and is registered; not interrupted.
    assert ends == {(True, False, False), (True, False, True), (True, True, False), (False, True, False)}


@pytest.mark.usefixtures("_impatient")
def test_interrupted_start_keeps_the_manager_usable(tmp_path: Path) -> None:
    manager = jct.StepManager(tmp_path / "run")
    saved = 0
    for number in itertools.count(1):
        with interrupt_at(number, *STARTING, StepSave.start) as seen, contextlib.suppress(KeyboardInterrupt):
            manager.save(number, {"state": {"w": np.arange(number)}})
        manager.wait(60)
        join_saves()
        saved += number in manager.steps
        if seen[0] < number:
            break
    assert 1 < saved < number
    manager.close()
    steps = jct.StepManager(tmp_path / "run").steps
    names = {path.name for path in (tmp_path / "run").iterdir()}
    left = names - {".lock", "history.jsonl", *(f"step-{step:010d}" for step in steps)}
    assert len(left) <= 8, "only interrupts before the start leave an attempt"
    assert all(".tmp-" in name for name in left)
    for step in steps:
        assert jct.verify(tmp_path / "run" / f"step-{step:010d}").ok
