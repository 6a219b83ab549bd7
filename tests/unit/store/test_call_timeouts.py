"""Storage calls with a time limit: a late result is undone, and the number of abandoned calls is limited."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store import threads, timeouts
from jaxckpt_train.store.threads import check_interrupt, interruptible
from jaxckpt_train.store.timeouts import BackgroundCall, call_with_timeout, report_progress, time_limited

pytestmark = pytest.mark.timeout(120)


class Disk:
    """A disk that returns the number of the call, but only after `responds` is set."""

    def __init__(self) -> None:
        self.responds, self.was_undone = threading.Event(), threading.Event()
        self.calls, self.undone = 0, list[tuple[int, str]]()

    def call(self) -> int:
        self.calls += 1
        assert self.responds.wait(60)
        return self.calls

    def undo(self, result: int) -> None:
        self.undone.append((result, threading.current_thread().name))
        self.was_undone.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(timeouts, "POLL_S", 0.02)
    made = Disk()
    yield made
    made.responds.set()


def interrupt() -> None:
    raise ZeroDivisionError("interrupted")


def test_late_result_is_undone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.05)
    with pytest.raises(CheckpointTimeoutError, match="no progress for"):
        call_with_timeout("a", disk.call, undo=disk.undo)
    assert disk.undone == []
    disk.responds.set()
    assert disk.was_undone.wait(30)
    assert disk.undone == [(1, "jaxckpt-ask")]


def test_result_after_interrupted_wait_is_undone(disk: Disk) -> None:
    with pytest.raises(ZeroDivisionError), interruptible(interrupt):
        call_with_timeout("a", disk.call, undo=disk.undo)
    disk.responds.set()
    assert disk.was_undone.wait(30)


def test_finished_call_is_undone_once_in_background(disk: Disk) -> None:
    disk.responds.set()
    abandoned = BackgroundCall(disk.call, disk.undo)
    abandoned.run()
    abandoned.is_done.open()  # as its thread does
    timeouts.abandon_call(abandoned)
    assert disk.was_undone.wait(30)
    abandoned.undo()
    assert disk.undone == [(1, "jaxckpt-ask")]


def test_collected_result_is_not_undone(disk: Disk) -> None:
    disk.responds.set()
    with interruptible(interrupt):
        assert call_with_timeout("a", disk.call, undo=disk.undo) == 1
    assert disk.undone == []


def test_number_of_abandoned_calls_is_limited(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    already_abandoned = timeouts._threads.get(None).abandoned_count()
    monkeypatch.setattr(timeouts, "MAX_ABANDONED", already_abandoned + 3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), interruptible(interrupt):
            call_with_timeout("a", disk.call)
    for _ in range(3):
        with pytest.raises(CheckpointTimeoutError, match=r"^b: .* \d+ earlier storage calls"):
            call_with_timeout("b", disk.call)
    assert disk.calls == 3
    abandoned = list(timeouts._threads.get(None).abandoned)
    disk.responds.set()
    for each in abandoned:
        assert each.is_done.wait(30)
    assert call_with_timeout("c", disk.call) == 4


def test_failed_undo_is_logged_and_frees_its_slot(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(timeouts, "MAX_ABANDONED", 1)

    def fail(result: int) -> None:
        disk.was_undone.set()
        raise MemoryError("of an undo")

    with pytest.raises(CheckpointTimeoutError, match="no progress for"):
        call_with_timeout("a", disk.call, undo=fail)
    (abandoned,) = timeouts._threads.get(None).abandoned
    disk.responds.set()
    assert disk.was_undone.wait(60)
    assert abandoned.is_done.wait(60)
    assert call_with_timeout("b", lambda: 7) == 7
    assert "of an undo" in caplog.text


@time_limited
def nested(directory: str, more: Disk) -> tuple[str, str, int]:
    return directory, threading.current_thread().name, inner(more)


@time_limited
def inner(disk: Disk) -> int:
    assert threading.current_thread().name == "jaxckpt-ask"
    return disk.call()


def test_nested_operations_share_one_thread(disk: Disk) -> None:
    disk.responds.set()
    assert nested("run", disk) == ("run", "jaxckpt-ask", 1)
    assert not timeouts._threads.get(None).abandoned


def test_subject_is_path_of_operation(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.05)
    with pytest.raises(CheckpointTimeoutError, match=r"^/a/run: "):
        nested("/a/run", disk)


def test_reported_progress_prevents_timeout(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.1)
    polls = list[float]()

    def poll() -> None:
        polls.append(time.monotonic())
        if len(polls) == 20:  # much more than the limit
            disk.responds.set()

    def slow() -> int:
        while not disk.responds.wait(0.001):
            report_progress()
        return 3

    with interruptible(poll):
        assert call_with_timeout("a", slow) == 3
    report_progress()  # outside of a call it does nothing


def test_interrupt_check_counts_within_its_context() -> None:
    seen = list[str]()
    with interruptible(lambda: seen.append("outer")):
        with interruptible(lambda: seen.append("inner")):
            check_interrupt()
        check_interrupt()
    check_interrupt()
    assert seen == ["outer", "inner", "outer"]


def test_check_that_waits_itself_is_not_repeated(disk: Disk) -> None:
    depth = list[int]()

    def check() -> None:
        depth.append(len(depth))
        call_with_timeout("notice", lambda: time.sleep(0.1))  # several polls
        disk.responds.set()

    with interruptible(check):
        assert call_with_timeout("a", disk.call) == 1
        calls = len(depth)
        check_interrupt()
    assert calls >= 1
    assert len(depth) == calls + 1
