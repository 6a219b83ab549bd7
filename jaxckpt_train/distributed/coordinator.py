"""How the processes of a job talk: collective operations, which all processes call in the same order.

They use a key-value store that all processes reach, and no devices, so a background thread may take part. Each
operation is a rendezvous (`rendezvous.py`) with keys of its own: the processes contribute values, and process 0
collects them, publishes the result, and deletes the keys once no process needs them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from jaxckpt_train.distributed.rendezvous import KeyValues, Rendezvous

LEAST_S, PER_PROCESS_S = 1.0, 1e-3  # process 0 answers each of the others at each poll
MOST_CALLS, PER_CALLS = 32, 10  # limit of calls per poll, and calls per ten processes: a loop may slow down suddenly
Moved = Callable[[], object]
BARRIER_TIMEOUT_S = 300.0
_LEFT = "left"
MOST_ENDED = 64  # rendezvous whose keys are kept until all processes are known to have left them


def no_result(values: Sequence[bytes]) -> bytes:
    """Merge nothing: the exchange has no result."""
    return b""


class Coordinator:
    """Collective operations of the processes of one job. All processes call every method, in the same order.

    This class serves a job of one process, in which they are trivial, and `ManyProcesses` any other job.

    Attributes:
        process: number of this process, from 0.
        processes: number of processes in the job.
    """

    process = 0
    processes = 1

    def within(self, name: str, timeout_s: float | None = None) -> Coordinator:
        """Create a coordinator with a separate order of calls, for another thread; all processes do so in one order.

        Args:
            name: its purpose.
            timeout_s: seconds without a sign of life after which a process counts as lost; None: as this one.
        """
        return self

    def share_error(self, doing: str, error: BaseException) -> None:
        """Raise an error of this process in the others, which may be waiting for it in an exchange."""

        def give() -> bytes:
            raise error

        with contextlib.suppress(type(error)):
            self.exchange(doing, give)

    def end(self) -> None:
        """Declare that this process no longer uses the coordinator."""

    def leave(self) -> None:
        """End, and make processes that wait for this one here, or in a coordinator below this one, raise an error."""

    def has_failed_elsewhere(self) -> bool:
        """Return whether the current operation has failed in another process; known some seconds later."""
        return False

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = no_result,
        moved: Moved | None = None,
        on_progress: Callable[[], object] | None = None,
    ) -> bytes:
        """Collect a value from every process, let process 0 merge them, and return the result in all processes.

        Args:
            doing: what the processes do here, for messages, such as "writing step 5".
            give: does the work of this process and returns its value.
            merge: called in process 0 with all values, in the order of the processes.
            moved: returns another value whenever `give` or `merge` has made progress; None: they are quick. A process
                that is stopped, has died, or makes no progress for the time limit counts as lost.
            on_progress: called whenever another process that is waited for has made progress.

        Raises:
            Any error that `give` or `merge` raised, in the process that called it.
            The same error in the others, with the process named; OtherProcessError if its class is not of this package.
            CheckpointTimeoutError: a process did not arrive or made no progress in time; names it.
        """
        return merge([give()])

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """Return the value of `say` in process 0 in all processes. Process 0 rarely waits for the others."""
        return say()


class ManyProcesses(Coordinator):
    """The coordinator of a multi-process job.

    Args:
        timeout_s: seconds without a sign of life after which a process counts as lost.
        nested: shared by all coordinators of the job; None: this is the first one.
        name: prefix of all its keys.
        outer: names of the coordinators above this one, except for the first, which no process leaves.
    """

    def __init__(
        self,
        values: KeyValues,
        process: int,
        processes: int,
        timeout_s: float = BARRIER_TIMEOUT_S,
        nested: _Nested | None = None,
        name: str = "jaxckpt",
        outer: Sequence[str] = (),
    ) -> None:
        self.process, self.processes = process, processes
        self._values, self._timeout_s, self._name = values, timeout_s, name
        self._ancestors = () if nested is None else (*outer, name)
        self._nested = _Nested(deletes_keys=process == 0) if nested is None else nested
        self._operations = 0
        self._broadcasts = 0  # since the last exchange
        self._ended: list[str] = []  # in process 0: folders of rendezvous whose keys still exist
        self._rendezvous: Rendezvous | None = None

    def within(self, name: str, timeout_s: float | None = None) -> Coordinator:
        """Create a coordinator whose keys have a prefix of their own."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        own = self._nested.begin(f"{self._name}/{name}")
        return ManyProcesses(self._values, self.process, self.processes, limit_s, self._nested, own, self._ancestors)

    def end(self) -> None:
        """Allow process 0 to delete the keys once no process uses the coordinator."""
        self._nested.end(self._name)

    def leave(self) -> None:
        """Set the key that announces it to the others, and end."""
        self._values.set(f"{self._name}/{_LEFT}/{self.process}", b"1")
        self.end()

    def has_failed_elsewhere(self) -> bool:
        """Return whether the current rendezvous has failed elsewhere."""
        return self._rendezvous is not None and self._rendezvous.has_failed_elsewhere()

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = no_result,
        moved: Moved | None = None,
        on_progress: Callable[[], object] | None = None,
    ) -> bytes:
        """Meet the other processes in a rendezvous."""
        self._broadcasts = 0
        rendezvous = self._open_rendezvous(doing, moved, on_progress)
        if self.process:
            return rendezvous.join(lambda: msgspec.msgpack.encode((self._nested.in_use(), give())))

        def act() -> bytes:
            values, uses = [give()], list[_Uses]()
            for each in rendezvous.collect():
                used, value = msgspec.msgpack.decode(each, type=tuple[_Uses, bytes])
                uses.append(used)
                values.append(value)
            for folder in [*self._ended, *self._nested.ended_in_all(uses)]:  # a process that is here has left these
                self._values.delete(folder)
            self._ended = []
            return merge(values)

        return self._lead(rendezvous, act)

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """Publish a value of process 0 without waiting, or as an exchange once many keys have piled up."""
        self._broadcasts += 1
        if self._broadcasts >= MOST_ENDED:  # an exchange lets process 0 delete the keys
            return self.exchange(doing, bytes, lambda values: say(), moved)
        rendezvous = self._open_rendezvous(doing, moved)
        return rendezvous.receive() if self.process else self._lead(rendezvous, say)

    def _open_rendezvous(
        self, doing: str, moved: Moved | None, on_progress: Callable[[], object] | None = None
    ) -> Rendezvous:
        self._operations += 1
        folder, left = f"{self._name}/{self._operations}", [f"{name}/{_LEFT}" for name in self._ancestors]
        self._rendezvous = Rendezvous(
            self._values, folder, self.process, self.processes, doing, self._timeout_s, moved, on_progress, left
        )
        return self._rendezvous

    def _lead(self, rendezvous: Rendezvous, act: Callable[[], bytes]) -> bytes:
        try:
            return rendezvous.lead(act)
        finally:
            self._ended.append(rendezvous.folder)


# How many coordinators a process has created so far, and the numbers of those that it still uses.
_Uses = tuple[int, list[int]]


class _Nested:
    """Numbers the nested coordinators of a job in the order in which all processes create them."""

    def __init__(self, *, deletes_keys: bool) -> None:
        self._begun, self._deletes_keys = 0, deletes_keys
        self._of_name = Counter[str]()
        self._open: dict[str, int] = {}  # their numbers
        self._undeleted: dict[int, str] = {}  # in process 0, which deletes keys: those whose keys may exist
        self._lock = threading.Lock()

    def begin(self, name: str) -> str:
        """Create a unique name for one more coordinator."""
        with self._lock:
            self._begun += 1
            self._of_name[name] += 1  # by name: a process that left a run creates fewer below it
            own = f"{name}-{self._of_name[name]}"
            self._open[own] = self._begun
            if self._deletes_keys:
                self._undeleted[self._begun] = own
        return own

    def end(self, own: str) -> None:
        """Record that this process no longer uses a coordinator."""
        with self._lock:
            self._open.pop(own, None)

    def in_use(self) -> _Uses:
        """Return what this process uses."""
        with self._lock:
            return self._begun, list(self._open.values())

    def ended_in_all(self, uses: Sequence[_Uses]) -> list[str]:
        """Return the names of coordinators that neither this nor the other processes use, each name once."""
        everywhere = [*uses, self.in_use()]
        begun = min(count for count, _ in everywhere)
        used = {number for _, numbers in everywhere for number in numbers}
        with self._lock:
            ended = [number for number in self._undeleted if number <= begun and number not in used]
            return [self._undeleted.pop(number) for number in ended]


class PollSchedule:
    """Decides at which calls of a loop the processes of a job communicate: about once a second.

    It counts calls. At each poll, process 0 decides after how many calls the next poll is due.
    """

    def __init__(self, processes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._period_s = LEAST_S + PER_PROCESS_S * processes
        self._most = max(MOST_CALLS, processes // PER_CALLS)
        self._monotonic = monotonic
        self._every, self._left = 1, 1
        self._at = monotonic()

    def is_due(self) -> bool:
        """Count a call; return whether a poll is due, after which the caller calls `set_next`."""
        self._left -= 1
        return self._left <= 0

    def next(self) -> int:
        """In process 0: return the number of calls until the next poll, at most twice as many as until this one."""
        now = self._monotonic()
        per_call_s = max((now - self._at) / self._every, 1e-9)
        self._at = now
        return max(1, min(int(self._period_s / per_call_s), 2 * self._every, self._most))

    def set_next(self, calls: int) -> None:
        """Set the number of calls until the next poll, as process 0 has decided."""
        self._every = self._left = calls
