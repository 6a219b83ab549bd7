"""Time limits in seconds of an idle reference machine, corrected for a slow or busy one."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator

_LOOP_S = 0.085 if sys.version_info >= (3, 12) else 0.055  # `_loop_s()` on the reference machine


def _loop_s() -> float:
    started, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number & 7
    return time.process_time() - started


@contextlib.contextmanager
def in_time(longest_s: float = 1.0) -> Iterator[None]:
    """Fail if the block takes more processor time than this.

    A slower or shared machine gets proportionally more time. Objects of earlier tests are frozen, so that the garbage
    collector does not visit them in the block.
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
