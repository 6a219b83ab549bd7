"""Calls of other tools' code that are under way, on whatever thread: the end of the process waits for them.

Where Python ends it ends its daemon threads too, as soon as they come back into it. One that has a frame of C++ below
it takes the whole process with it then: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import errno
import os
import threading

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.per_process import PerProcess

PATIENCE_S = 30.0  # a disk that does not answer must not keep the process


class _Calls:
    """Those of this process."""

    def __init__(self, _: None) -> None:
        self._changed, self._count, self._process = threading.Condition(), 0, os.getpid()
        self._is_over = False
        atexit.register(self._wait)

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over and threading.current_thread().daemon:  # one that reads ahead, between two calls
                raise StorageError(errno.ECANCELED, "the process is ending")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        if os.getpid() == self._process:  # a forked child has none of these threads
            with self._changed:
                self._is_over = True
                self._changed.wait_for(lambda: self._count == 0, PATIENCE_S)


_calls = PerProcess(_Calls)


def foreign_call() -> _Calls:
    """A context: what is called within has come back before the process ends.

    It raises StorageError on a daemon thread of a process that is ending: nobody waits for that any more.
    """
    return _calls.get(None)
