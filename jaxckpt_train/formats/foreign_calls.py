"""Calls of other tools' code that are under way, on whatever thread: the end of the process waits for them.

Where Python ends it ends its daemon threads too, as soon as they come back into it. One that has a frame of C++ below
it takes the whole process with it then: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import threading
import time

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.answers import asks_since
from jaxckpt_train.store.per_process import PerProcess

PATIENCE_S = 30.0  # a disk that does not answer must not keep the process
MOMENT_S = 2.0  # nor somebody who has interrupted it


class _Calls:
    """Those of this process."""

    def __init__(self, _: None) -> None:
        self._changed, self._count, self._process = threading.Condition(), 0, os.getpid()
        self._over_since, self.patience_s = math.inf, PATIENCE_S
        atexit.register(self._wait)

    def __enter__(self) -> None:
        with self._changed:
            since = asks_since()
            if since is not None and since < self._over_since < math.inf:  # reads ahead, and was between two calls
                raise StorageError(errno.ECANCELED, "the process is ending")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        if os.getpid() == self._process:  # a forked child has none of these threads
            with self._changed:
                self._over_since = time.monotonic()
                self._changed.wait_for(lambda: self._count == 0, self.patience_s)


_calls = PerProcess(_Calls)


def foreign_call() -> _Calls:
    """A context: what is called within has come back before the process ends.

    In a process that is ending it raises StorageError where what is asked was begun before that: nobody waits for it.
    """
    return _calls.get(None)


def hurry() -> None:
    """Have the end of the process wait for a moment only: somebody has interrupted it."""
    _calls.get(None).patience_s = MOMENT_S
