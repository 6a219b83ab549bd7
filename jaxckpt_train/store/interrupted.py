"""Calls again what a signal interrupted: Python does so for reads, writes and syncs, but not for calls on names."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_LOOKS = 3
P = ParamSpec("P")
T = TypeVar("T")


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of the call, made until it is not interrupted (EINTR, of network and user-space file systems).

    A name that a network file system calls stale is looked up anew, a few times.

    Raises:
        FileNotFoundError: it stays stale (ESTALE): another machine has removed it.
    """
    looks = 1
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue  # Python has run the signal's handler by now; one that raises ends this
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            if looks == _LOOKS:
                raise FileNotFoundError(errno.ESTALE, error.strerror, error.filename) from error
            looks += 1
