"""Keeps the garbage collector quiet for a moment in which many objects are made, all of which stay."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_pausing = threading.Lock()
_threshold = 0


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """No collection within, unless another thread is within: for fractions of a second beside what is waited for.

    A full collection looks at every object of the process, of which JAX alone has some hundred thousands; the records
    of a few thousand leaves set one off, which takes longer than all else that is done with them.

    It is the threshold that pauses: a loop may call `gc.disable()` meanwhile, and finds it as it has left it. (Not so a
    threshold of 0 that it sets meanwhile, or one that it has read meanwhile and sets later.)
    """
    global _threshold
    if not gc.isenabled() or not gc.get_threshold()[0] or not _pausing.acquire(blocking=False):
        yield
        return
    try:
        _threshold = gc.get_threshold()[0]
        gc.set_threshold(0)
        yield
    finally:
        _go_on()
        _pausing.release()


def _go_on() -> None:
    if not gc.get_threshold()[0]:  # else someone has set another meanwhile
        gc.set_threshold(_threshold)


def _go_on_in_child() -> None:
    """A forked child lacks the thread that would end the pause."""
    global _pausing
    if _pausing.locked():
        _go_on()
    _pausing = threading.Lock()


os.register_at_fork(after_in_child=_go_on_in_child)
