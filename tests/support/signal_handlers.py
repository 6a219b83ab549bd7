"""Puts the handlers of signals back after a test, and looks whether the test has left any."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from jaxckpt_train.preemption.watch import SignalHandler

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handlers_put_back(*numbers: int, may_end: bool = False) -> Iterator[None]:
    """Within, a test may install handlers, and has to take them away again.

    Args:
        numbers: of the signals.
        may_end: whether one may stay that is live no more: of a signal that the process ends for, and that may come
            again.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    found = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    for number, handler in found.items():
        is_over = may_end and isinstance(handler, SignalHandler) and not handler.is_live()
        assert handler == before[number] or is_over, f"signal {number}: {handler!r} was left"
