"""Things that a process makes once for each key and shares: pools, threads, what was measured."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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
        self._lock = threading.Lock()

    def get(self, key: K) -> V:
        """The thing for this key, the same one at every call."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]
