"""The order in which hosts are called: each for one thing at a time, so that it needs the memory of one."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Hashable, Sequence


class Turns:
    """Hands out numbers of calls to the threads that make them, those of a host one after the other.

    Args:
        hosts: of each call.
    """

    def __init__(self, hosts: Sequence[Hashable]) -> None:
        self._hosts = hosts
        self._left: dict[Hashable, deque[int]] = {}
        for number, host in enumerate(hosts):
            self._left.setdefault(host, deque()).append(number)
        self._ready = queue.SimpleQueue[deque[int] | None]()  # of the hosts that have nothing to do, what is left
        self._is_over = False
        for left in self._left.values():
            self._ready.put(left)

    def take(self) -> int | None:
        """The next call of a host that has nothing to do; None: it is over. May be called once for each call.

        Waits until there is such a host: until `let_go`, or `end`.
        """
        left = self._ready.get()
        return None if left is None or self._is_over else left.popleft()

    def let_go(self, number: int) -> None:
        """The host of this call has nothing of it any more."""
        left = self._left[self._hosts[number]]
        if left:
            self._ready.put(left)

    def end(self) -> None:
        """Begin no further call; who waits goes on, as some hosts may never have done."""
        self._is_over = True
        for _ in self._hosts:
            self._ready.put(None)
