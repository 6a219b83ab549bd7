"""What is to take no long time: seconds of a machine at rest, however slow the one here is at the moment."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator

_LOOP_S = 0.085 if sys.version_info >= (3, 12) else 0.055  # as `_loop_s` takes on the machines that this is made for


def _loop_s() -> float:
    started, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number & 7
    return time.process_time() - started


@contextlib.contextmanager
def in_time(longest_s: float = 1.0) -> Iterator[None]:
    """Fail if what is done within takes more processor time than this.

    A machine of which others take half, or whose cores share what they calculate with, is given as much more. What
    other tests have left in memory is not gone through meanwhile.
    """
    gc.collect()
    gc.freeze()
    try:
        started = time.process_time()
        yield
        took_s = time.process_time() - started
    finally:
        gc.unfreeze()
    if took_s >= longest_s:
        slowness = max(1.0, _loop_s() / _LOOP_S)
        assert took_s < longest_s * slowness, f"took {took_s:.3g} s, on a machine {slowness:.3g} times as slow"
