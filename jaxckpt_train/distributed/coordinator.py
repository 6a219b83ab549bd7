"""The Coordinator: what the processes of one job do together, each of them at the same places, in the same order.

Ticks: at which calls of a loop the processes of a job talk to each other, about once a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from jaxckpt_train.distributed.rendezvous import KeyValues, Rendezvous

LEAST_S, PER_PROCESS_S = 1.0, 1e-3  # process 0 answers each of the others at each tick
MOST_CALLS, PER_CALLS = 32, 10  # so many, or one for ten processes: a loop may become much slower from call to call
Moved = Callable[[], object]
BARRIER_TIMEOUT_S = 300.0
_LEFT = "left"
MOST_ENDED = 64  # meetings whose keys stay until all are known to have left them


class PollSchedule:
    """Counts calls; every so manieth is a tick. Process 0 says at each tick how many calls later the next one is.

    Args:
        processes: how many there are.
        monotonic: the time in seconds.
    """

    def __init__(self, processes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._period_s = LEAST_S + PER_PROCESS_S * processes
        self._most = max(MOST_CALLS, processes // PER_CALLS)
        self._monotonic = monotonic
        self._every, self._left = 1, 1
        self._at = monotonic()

    def is_due(self) -> bool:
        """Count a call; whether it is a tick, after which `set_next` is called."""
        self._left -= 1
        return self._left <= 0

    def next(self) -> int:
        """In process 0: in how many calls the next one should be. At most twice as many as since the last one."""
        now = self._monotonic()
        per_call_s = max((now - self._at) / self._every, 1e-9)
        self._at = now
        return max(1, min(int(self._period_s / per_call_s), 2 * self._every, self._most))

    def set_next(self, calls: int) -> None:
        """Take note of what process 0 has said."""
        self._every = self._left = calls


def always(values: Sequence[bytes]) -> bytes:
    """For what nobody has anything to say of."""
    return b""


def nothing() -> None:
    """For what nobody wants to be told."""


class Coordinator(Protocol):
    """What the processes of one job agree through. Every method is called by all of them, in the same order.

    Attributes:
        process: number of this process, from 0.
        processes: how many there are.
    """

    process: int
    processes: int

    def within(self, name: str, timeout_s: float | None = None) -> Coordinator:
        """A coordinator with an order of its own, for another thread. All processes ask for the same ones in turn.

        Args:
            name: what it is for.
            timeout_s: seconds without a sign of life after which a process is not waited for; None: as this one.
        """

    def end(self) -> None:
        """This process does not use it any more."""

    def leave(self) -> None:
        """As `end`; and whoever waits for this process in it, or within it, is told that it does not come.

        Raises:
            CheckpointError: they cannot be told.
        """

    def is_over(self) -> bool:
        """Whether what goes on now has failed in another process; known some seconds later."""

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
        heard: Callable[[], object] = nothing,
    ) -> bytes:
        """Have all processes give a value, and process 0 make one result of them, which all return.

        Args:
            doing: what all do here, for messages, such as "writing step 5".
            give: what this process does, and has to say of it.
            merge: called by process 0 with all values, in the order of the processes.
            moved: gives another value whenever `give` or `merge` has got further; None: they are quick. A process is
                not waited for any longer that is stopped, gone, or has not got any further for the time limit.
            heard: called whenever another process that is waited for has got further.

        Raises:
            What `give` or `merge` raised, in the process that called it.
            The same error, told by whom, in the others; OtherProcessError if it is none of this package.
            CheckpointTimeoutError: a process did not come, or got no further, in time; names it.
        """

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """What process 0 says; it does not wait for the others, but for once in a while.

        Raises:
            As `exchange`.
        """

    def barrier(self, doing: str) -> None:
        """Wait until all processes are here.

        Raises:
            As `exchange`.
        """


class SingleProcess:
    """The coordinator of a job of one process: it always agrees with itself."""

    process = 0
    processes = 1

    def within(self, name: str, timeout_s: float | None = None) -> Coordinator:
        """Itself."""
        return self

    def end(self) -> None:
        """Nothing to let go of."""

    def leave(self) -> None:
        """Nobody to be told."""

    def is_over(self) -> bool:
        """There is no other."""
        return False

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
        heard: Callable[[], object] = nothing,
    ) -> bytes:
        """What is made of its own value."""
        return merge([give()])

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """What it says itself."""
        return say()

    def barrier(self, doing: str) -> None:
        """Nobody to wait for."""


class ManyProcesses:
    """The coordinator of a job of several processes.

    Args:
        values: through which they talk.
        process: number of this one.
        processes: how many there are.
        timeout_s: seconds without a sign of life after which a process is not waited for any more.
        orders: of the coordinator that this one is within; None: it is the first.
        name: what all its keys begin with.
        outer: the names of those that this one is within, but for the first, which nobody leaves.
    """

    def __init__(
        self,
        values: KeyValues,
        process: int,
        processes: int,
        timeout_s: float = BARRIER_TIMEOUT_S,
        orders: _Orders | None = None,
        name: str = "jaxckpt",
        outer: Sequence[str] = (),
    ) -> None:
        self.process, self.processes = process, processes
        self._values, self._timeout_s, self._name = values, timeout_s, name
        self._within = () if orders is None else (*outer, name)
        self._orders = _Orders(keeps=process == 0) if orders is None else orders
        self._met = 0  # how many times
        self._told = 0  # how many times since the last exchange
        self._ended: list[str] = []  # at process 0: folders of meetings whose keys are still there
        self._rendezvous: Rendezvous | None = None

    def within(self, name: str, timeout_s: float | None = None) -> Coordinator:
        """One with an order of its own."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        own = self._orders.begin(f"{self._name}/{name}")
        return ManyProcesses(self._values, self.process, self.processes, limit_s, self._orders, own, self._within)

    def end(self) -> None:
        """Its keys may go once no process uses it any more."""
        self._orders.end(self._name)

    def leave(self) -> None:
        """As the protocol says."""
        self._values.set(f"{self._name}/{_LEFT}/{self.process}", b"1")
        self.end()

    def is_over(self) -> bool:
        """As the protocol says."""
        return self._rendezvous is not None and self._rendezvous.is_over

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
        heard: Callable[[], object] = nothing,
    ) -> bytes:
        """As the protocol says."""
        self._told = 0
        rendezvous = self._meet(doing, moved, heard)
        if self.process:
            return rendezvous.join(lambda: self._orders.encoded() + give())

        def act() -> bytes:
            mine = give()
            uses, others = self._orders.decoded(rendezvous.collect())
            for folder in [*self._ended, *self._orders.ended_in_all(uses)]:  # who is here has left these
                self._values.delete(folder)
            self._ended = []
            return merge([mine, *others])

        return self._held(rendezvous, act)

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """As the protocol says."""
        self._told += 1
        if self._told >= MOST_ENDED:  # else the keys of a job that only tells pile up
            return self.exchange(doing, lambda: b"", lambda values: say(), moved)
        rendezvous = self._meet(doing, moved)
        return rendezvous.hear() if self.process else self._held(rendezvous, say)

    def barrier(self, doing: str) -> None:
        """As the protocol says."""
        self.exchange(doing, lambda: b"")

    def _meet(self, doing: str, moved: Moved | None, heard: Callable[[], object] = nothing) -> Rendezvous:
        self._met += 1
        folder = f"{self._name}/{self._met}"
        left = [f"{name}/{_LEFT}" for name in self._within]
        self._rendezvous = Rendezvous(
            self._values, folder, self.process, self.processes, doing, self._timeout_s, moved, heard, left
        )
        return self._rendezvous

    def _held(self, rendezvous: Rendezvous, act: Callable[[], bytes]) -> bytes:
        try:
            return rendezvous.lead(act)
        finally:
            self._ended.append(rendezvous.folder)


class _Uses(msgspec.Struct, array_like=True):
    """Which coordinators a process uses.

    Attributes:
        begun: how many it has asked for so far.
        open: those of them that it still uses, by their number.
    """

    begun: int
    open: tuple[int, ...]


class _Orders:
    """The coordinators within one, in the order in which all processes ask for them."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps  # whether this is process 0, which removes their keys
        self._begun = 0
        self._of_name: dict[str, int] = {}  # how many of each name
        self._open: dict[str, int] = {}  # their numbers
        self._there: dict[int, str] = {}  # at process 0: those whose keys may be there
        self._lock = threading.Lock()

    def begin(self, name: str) -> str:
        """A name of its own for one more."""
        with self._lock:
            count = self._of_name[name] = self._of_name.get(name, 0) + 1
            own, self._begun = f"{name}-{count}", self._begun + 1
            self._open[own] = self._begun
            if self._keeps:
                self._there[self._begun] = own
        return own

    def end(self, own: str) -> None:
        """It is not used here any more."""
        with self._lock:
            self._open.pop(own, None)

    def encoded(self) -> bytes:
        """What process 0 is told of them, before any value."""
        data = msgspec.msgpack.encode(self._uses())
        return len(data).to_bytes(4, "big") + data

    def _uses(self) -> _Uses:
        with self._lock:
            return _Uses(self._begun, tuple(self._open.values()))

    def decoded(self, told: list[bytes]) -> tuple[list[_Uses], list[bytes]]:
        """What the others have told, and their values, which take the places of what they have told."""
        uses = []
        for number, each in enumerate(told):
            end = 4 + int.from_bytes(each[:4], "big")
            uses.append(msgspec.msgpack.decode(each[4:end], type=_Uses))
            told[number] = each[end:]
        return uses, told

    def ended_in_all(self, uses: Sequence[_Uses]) -> list[str]:
        """The names of those that no process uses any more, each once."""
        everywhere = [*uses, self._uses()]
        begun = min(each.begun for each in everywhere)
        used = {number for each in everywhere for number in each.open}
        with self._lock:
            ended = [number for number in self._there if number <= begun and number not in used]
            return [self._there.pop(number) for number in ended]
