"""The events of a process: its start, its progress and its end, also on a disk that refuses or hangs."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.run import history as run_log
from jaxckpt_train.run import lock
from jaxckpt_train.run.history import HISTORY_NAME, LEAST_S, MOST_S, History, RunLog
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.threads import interruptible
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.locks import remove_lock
from tests.support.runs import Clock, Counter, state_of
from tests.support.signal_handlers import handlers_put_back

pytestmark = pytest.mark.timeout(120)


class Log(RunLog):
    """The log of a process with a fake clock."""

    def __init__(self, directory: Path, backend: LocalBackend | None = None) -> None:
        self.now, self.history = 0.0, History(backend or LocalBackend(), str(directory))
        super().__init__(self.history, Clock(), lambda: self.now)

    def events(self) -> list[dict[str, Any]]:
        """The events without their times."""
        return [{name: event[name] for name in event if name != "time"} for event in self.history.events()]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(run_log, "_resumes", itertools.count())
    monkeypatch.setattr(run_log, "run_facts", lambda: {"host": "here", "pid": 7})
    return Log(tmp_path)


def test_process_records_start_and_end(log: Log) -> None:
    log.started()
    log.resumed(100, 2.5)
    log.completed = 117
    log.ends_as = "finished"
    log.ended()
    start, resumed, end = log.events()
    assert start == {"event": "start", "host": "here", "pid": 7}
    assert 0 < resumed.pop("process_age_s") < 1e6
    assert resumed == {"event": "resumed", "step": 100, "resume_s": 2.5}
    assert end == {"event": "end", "how": "finished", "step": 117}
    log.ended()
    log.beat()
    assert len(log.events()) == 3


def test_only_first_loop_reports_process_age(log: Log) -> None:
    for _ in range(2):
        log.started(5)
        log.resumed(5, 0.5)
        log.ended()
    first, second = [event for event in log.events() if event["event"] == "resumed"]
    assert ("process_age_s" in first, "process_age_s" in second) == (True, False)
    assert log.events()[0]["step"] == 5
    assert log.events()[-1] == {"event": "end", "how": "closed", "step": 5}


def test_process_without_ownership_logs_nothing(log: Log) -> None:
    log.resumed(5, 0.5)
    log.completed = 7
    log.now = 1e6
    log.beat()
    log.ended()
    assert log.events() == []


def steps_noted(log: Log, until_s: float, every_s: float = 1.0) -> list[float]:
    """Beat until `until_s` in a loop with an update each second, and return when progress was noted."""
    found, before = [], len(log.events())
    while log.now < until_s:
        log.now += every_s
        log.completed = round(log.now)
        log.beat()
        if len(log.events()) > before:
            before += 1
            found.append(log.now)
    return found


def test_progress_is_noted_less_often_over_time(log: Log) -> None:
    log.started()
    log.resumed(0, 0.1)
    noted = steps_noted(log, 3600.0, every_s=10.0)
    gaps = [later - step for step, later in itertools.pairwise(noted)]
    assert noted[0] == pytest.approx(10.0)
    assert min(gaps) >= LEAST_S
    assert gaps[-1] == MOST_S
    assert gaps == sorted(gaps)
    assert log.events()[-1] == {"event": "progress", "step": round(noted[-1])}


def test_idle_loop_logs_nothing(log: Log) -> None:
    log.started()
    log.resumed(40, 0.1)
    for _ in range(10):
        log.now += 1000.0
        log.beat()
    assert [event["event"] for event in log.events()] == ["start", "resumed"]
    log.completed = 41
    log.beat()
    assert log.events()[-1] == {"event": "progress", "step": 41}


def test_lock_heartbeat_records_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(run_log, "LEAST_S", 0.0)
    monkeypatch.setattr(run_log, "MOST_S", 0.0)
    pause = threading.Event()
    with jct.CheckpointCallback(str(tmp_path), save_interval_steps=1000) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(1):
            ckpt.manager.decide(step + 1)
            while "progress" not in (tmp_path / HISTORY_NAME).read_text():
                pause.wait(0.01)
            ckpt(state_of(step + 1))
    events = {event["event"]: event for event in ckpt.manager.history.events()}
    assert events["progress"]["step"] == 1


def test_unwritable_history_costs_warnings_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jaxckpt_train")
    backend = RefusingBackend("append", HISTORY_NAME, errno.ENOSPC, 10**6)
    for updates in (3, 5):
        with callback_on(backend, tmp_path, save_interval_steps=2) as ckpt:
            ckpt.resume(state_of(0), Counter())
            for step in ckpt.steps(updates):
                ckpt(state_of(step + 1))
        assert ckpt.summary(show=False).attempts == ()
    assert jct.StepManager(tmp_path).steps == [2, 3, 4, 5]
    assert sum("the history was not written" in message for message in caplog.messages) >= 10
    assert not (tmp_path / HISTORY_NAME).exists()


def test_refused_notes_spoil_no_other_event(tmp_path: Path) -> None:
    backend = RefusingBackend("append", HISTORY_NAME, errno.ENOSPC, 1)  # the start of the second process
    for times, updates in ((0, 10), (1, 20)):
        backend.times = times
        with callback_on(backend, tmp_path) as ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(updates):
                ckpt(state_of(step + 1))
    found = ckpt.summary(show=False)
    assert (found.useful_steps, found.redone_steps) == (20, 0)


class HungHistory(HoldingBackend):
    """A disk on which writes to the history hang until `go` is set."""

    def __init__(self, after: int = 0) -> None:
        super().__init__("append", HISTORY_NAME)
        self.after = after  # the number of writes that succeed before

    def append(self, path: str, data: bytes) -> None:
        if self._part in path and self.after > 0:
            self.after -= 1
            LocalBackend.append(self, path, data)
        else:
            super().append(path, data)


@pytest.mark.parametrize("after", [0, 1])
def test_stuck_history_delays_loop_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(run_log, "NOTE_S", 0.05)
    backend = HungHistory(after)
    ckpt = callback_on(backend, tmp_path)
    ckpt.resume(state_of(0))
    assert [ckpt(state_of(step + 1)).saved for step in ckpt.steps(3)] == [False, False, True]
    assert "MainThread" not in backend.threads
    backend.go.set()
    ckpt.close()
    assert jct.StepManager(tmp_path).steps == [3]


def test_interrupt_check_ends_wait_for_note(tmp_path: Path) -> None:
    backend = HungHistory(1)
    log = Log(tmp_path, backend)
    log.started()

    def check() -> None:
        raise CheckpointTimeoutError("asked to leave")

    with pytest.raises(CheckpointTimeoutError, match="asked to leave"), interruptible(check):
        log.resumed(0, 0.1)
    backend.go.set()


def test_superseded_owner_records_no_end(tmp_path: Path) -> None:
    first = jct.StepManager(tmp_path)
    first.own()
    remove_lock(tmp_path)  # as in a takeover
    with jct.StepManager(tmp_path) as second:
        second.save(5, {"state": state_of(5)})
        second.wait()
        first._run.log.completed = 99
        first.close()
        assert [event["event"] for event in second.history.events()] == ["start", "start", "save"]
        (lost, running) = second.goodput().attempts
        assert (lost.how, running.how, running.last_step) == ("killed", "running", 5)


def test_request_to_leave_ends_wait_for_note(tmp_path: Path) -> None:
    backend = HungHistory(1)
    ckpt = callback_on(backend, tmp_path, grace_period_s=2.0, on_preemption="raise")
    started_at = time.monotonic()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with handlers_put_back(signal.SIGTERM, may_end=True), pytest.raises(jct.Preempted, match="no step is saved"), ckpt:
        ckpt.resume(state_of(0))
    took_s = time.monotonic() - started_at
    backend.go.set()
    assert took_s < 10.0  # the time limit of a note is a minute
