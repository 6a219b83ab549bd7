"""Latches and mailboxes keep working when a signal handler interrupts a waiting thread."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from typing import Any

import pytest

from jaxckpt_train.store.threads import Latch, Mailbox


def test_wait_on_closed_latch_times_out() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.wait(0)
    latch.open()
    assert latch.wait(0)
    assert latch.wait()


def test_open_wakes_all_waiting_threads() -> None:
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


def test_interrupted_waits_leave_the_latch_working() -> None:
    """A `threading.Event` eventually hangs here: the lock of its condition is never released."""
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


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait", [lambda: Latch().wait(0.2), lambda: Mailbox[int]().get(0.2)])
def test_long_signal_handler_does_not_extend_wait(wait: Any) -> None:
    """`queue.SimpleQueue.get(timeout=0.2)` hangs here before Python 3.13."""
    handled: list[float] = []

    def slowly(*_: Any) -> None:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            pass
        handled.append(until)

    before = signal.signal(signal.SIGUSR1, slowly)
    kick = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    try:
        kick.start()
        with contextlib.suppress(queue.Empty):
            assert wait() is False
    finally:
        kick.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(handled) == 1


def test_mailbox_keeps_every_message_in_sender_order() -> None:
    box, senders = Mailbox[tuple[int, int]](), 4

    def send(sender: int) -> None:
        for number in range(2000):
            box.put((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    found = [box.get(60) for _ in range(2000 * senders)]
    for thread in threads:
        thread.join()
    assert box.empty()
    for sender in range(senders):
        assert [number for each, number in found if each == sender] == list(range(2000))
    with pytest.raises(queue.Empty):
        box.get(0)
