"""Restore signal handlers after a test, and check that the test left none."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from jaxckpt_train.preemption.sources import FileNotice, SignalHandler, SignalNotice, TimeNotice

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handlers_put_back(*numbers: int, may_end: bool = False) -> Iterator[None]:
    """Check that a test removes the handlers that it installs, and restore the earlier ones.

    Args:
        numbers: of the signals.
        may_end: whether a handler may stay that is not live any more, as after a signal that ends the process.
    """
    for number in numbers:
        if isinstance(signal.getsignal(number), SignalHandler):  # left by a test of another file
            signal.signal(number, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    found = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    for number, handler in found.items():
        is_over = may_end and isinstance(handler, SignalHandler) and not handler.is_live()
        assert handler == before[number] or is_over, f"signal {number}: {handler!r} was left"


def reason_of(source: FileNotice | SignalNotice | TimeNotice) -> str | None:
    """Return the reason of the request that a source has noticed; None: it has noticed none."""
    found = source.notice()
    return None if found is None else found.reason
