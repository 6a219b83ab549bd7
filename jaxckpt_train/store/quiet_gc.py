"""Keeps the garbage collector quiet for a moment in which many objects are made, all of which stay."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_pausing = threading.Lock()


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """No collection within, unless another thread is within: for fractions of a second beside what is waited for.

    A full collection looks at every object of the process, of which JAX alone has some hundred thousands; the records
    of a few thousand leaves set one off, which takes longer than all else that is done with them.
    """
    if not gc.isenabled() or not _pausing.acquire(blocking=False):
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
        _pausing.release()


def _go_on_in_child() -> None:
    """A forked child lacks the thread that would end the pause."""
    global _pausing
    if _pausing.locked():
        gc.enable()
    _pausing = threading.Lock()


os.register_at_fork(after_in_child=_go_on_in_child)
