"""A forked process reports its events however it ends, and its stacks if it hangs."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.support.forking import Tell, forked

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*fork")]


def test_output_before_the_kill_is_received() -> None:
    def work(tell: Tell) -> None:
        tell("began", 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(work) == ([("began", 1)], -signal.SIGKILL)


def test_error_of_child_is_reported() -> None:
    lines, status = forked(lambda tell: tell("length", len(7)))  # type: ignore[arg-type]
    assert status == 1
    assert "has no len" in lines[0][1]


def wait_twice_for_a_lock(lock: threading.Lock) -> None:
    """Wait forever."""
    with lock, lock:
        pass


def test_deadlock_shows_stack_of_each_thread() -> None:
    def work(tell: Tell) -> None:
        lock = threading.Lock()
        threading.Thread(target=wait_twice_for_a_lock, args=(lock,), daemon=True).start()
        wait_twice_for_a_lock(lock)

    lines, status = forked(work, longest_s=1)
    assert status == -signal.SIGALRM
    ((what, where),) = lines
    assert what == "raised"
    assert where.count("in wait_twice_for_a_lock") == 2


def test_alarm_handler_of_parent_has_no_effect() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        lines, status = forked(lambda _: wait_twice_for_a_lock(threading.Lock()), longest_s=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert status == -signal.SIGALRM
    assert "in wait_twice_for_a_lock" in lines[0][1]
