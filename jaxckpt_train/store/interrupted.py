"""Calls again what a signal interrupted: Python does so for reads, writes and syncs, but not for calls on names."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of the call, made until it is not interrupted (EINTR, of network and user-space file systems)."""
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue  # Python has run the signal's handler by now; one that raises ends this
