"""What a forked child makes anew, having none of its parent's threads: what a process shares, and guards."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PerProcess(Generic[K, V]):
    """Makes the thing for a key when it is first asked for. A forked child makes its own.

    The child has none of its parent's threads; what these held, a lock or a lent buffer, is held for ever there.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._made: dict[K, V] = {}
        self._lock = threading.RLock()  # a signal's handler may ask while this thread makes one

    def get(self, key: K) -> V:
        """The thing for this key, the same one at every call."""
        with self._lock:
            if key not in self._made:
                made = self._make(key)
                self._made.setdefault(key, made)  # a handler's own stays
            return self._made[key]


class Guarded(Protocol):
    """What threads use one after the other, each as often within as it likes."""

    _guard: Any


_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()


def free_in_child(guarded: Guarded) -> None:
    """Have a forked child find it free, whoever had it in the parent: that thread is not there, and lets nobody in."""
    _guarded.add(guarded)


def _free() -> None:
    for guarded in list(_guarded):
        guarded._guard = threading.RLock()


os.register_at_fork(after_in_child=_free)
