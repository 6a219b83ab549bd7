"""Keeps the garbage collector quiet for a moment in which many objects are made, all of which stay."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator

_guard = threading.RLock()
_threshold = 0  # that is to be set again when the pause ends; 0: there is none


class _Pause:
    """One pause. If an interrupt keeps it from ending, the next one does that: when nothing refers to it any more."""

    def begin(self) -> None:
        """Pause, unless the collector is off anyway, or paused by another thread."""
        global _current, _threshold
        with _guard:
            if _current() is None:
                _go_on()
                if gc.isenabled():
                    _current = weakref.ref(self)
                    _threshold = gc.get_threshold()[0]
                    gc.set_threshold(0)

    def end(self) -> None:
        """Go on as before."""
        global _current
        with _guard:
            if _current() is self:
                _go_on()
                _current = _nobody


def _go_on() -> None:
    global _threshold
    if _threshold and not gc.get_threshold()[0]:  # else someone has set another meanwhile
        gc.set_threshold(_threshold)
    _threshold = 0


def _nobody() -> _Pause | None:
    return None


_current = _nobody


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """No collection within, unless another thread is within: for fractions of a second beside what is waited for.

    A full collection looks at every object of the process, of which JAX alone has some hundred thousands; the records
    of a few thousand leaves set one off, which takes longer than all else that is done with them.

    It is the threshold that pauses: a loop may call `gc.disable()` meanwhile, and finds it as it has left it. (Not so a
    threshold of 0 that it sets meanwhile, or one that it has read meanwhile and sets later.)
    """
    pause = _Pause()
    try:
        pause.begin()
        yield
    finally:
        pause.end()


def _go_on_in_child() -> None:
    """A forked child lacks the thread that would end the pause."""
    global _guard, _current
    _guard, _current = threading.RLock(), _nobody
    _go_on()


os.register_at_fork(after_in_child=_go_on_in_child)
