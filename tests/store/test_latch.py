"""The latch: opened once, for everyone, whatever a signal handler does to one who waits."""

from __future__ import annotations

import queue
import signal
import threading
from typing import Any

import pytest

from jaxckpt_train.store.latch import Latch


def test_a_closed_latch_is_waited_for_no_longer_than_asked() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.wait(0)
    latch.open()
    assert latch.wait(0)
    assert latch.wait()


def test_everyone_who_waits_is_let_through() -> None:
    latch, together = Latch(), threading.Barrier(6)
    seen: list[bool] = []

    def pass_through() -> None:
        together.wait()
        seen.append(latch.wait(60))

    threads = [threading.Thread(target=pass_through) for _ in range(5)]
    for thread in threads:
        thread.start()
    together.wait()
    latch.open()
    for thread in threads:
        thread.join()
    assert seen == [True] * 5
    assert latch._waiters == []


def test_interrupts_at_any_moment_of_waiting_leave_it_working() -> None:
    """A `threading.Event` hangs here sooner or later: the lock of its condition is never given back."""
    go: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def kick() -> None:
        while (delay := go.get()) is not None:
            for _ in range(delay):
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    kicker = threading.Thread(target=kick)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        kicker.start()
        for number in range(300):
            latch = Latch()
            with pytest.raises(KeyboardInterrupt):
                go.put(number * 10)
                while True:
                    latch.wait(1e-3)
            opener = threading.Thread(target=latch.open)
            opener.start()
            assert latch.wait(60)
            opener.join()
    finally:
        go.put(None)
        kicker.join()
        signal.signal(signal.SIGUSR1, before)
