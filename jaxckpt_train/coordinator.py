"""The Coordinator: what the processes of one job do together, each of them at the same places, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxckpt_train.key_values import KeyValues
from jaxckpt_train.meeting import Meeting

Moved = Callable[[], object]
BARRIER_TIMEOUT_S = 300.0


def always(values: Sequence[bytes]) -> bytes:
    """For what nobody has anything to say of."""
    return b""


class Coordinator(Protocol):
    """What the processes of one job agree through. Every method is called by all of them, in the same order.

    Attributes:
        process: number of this process, from 0.
        processes: how many there are.
    """

    process: int
    processes: int

    def within(self, name: str, after: Coordinator | None = None) -> Coordinator:
        """A coordinator with an order of its own, for another thread; all processes give it the same new name.

        `after`: an earlier one, which a process does not use any more that comes to an exchange of the new one.
        """

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
    ) -> bytes:
        """Have all processes give a value, and process 0 make one result of them, which all return.

        Args:
            doing: what all do here, for messages, such as "writing step 5".
            give: what this process does, and has to say of it.
            merge: called by process 0 with all values, in the order of the processes.
            moved: gives another value whenever `give` or `merge` has got further; None: they are quick. A process is
                not waited for any longer that is stopped, gone, or has not got any further for the time limit.

        Raises:
            What `give` or `merge` raised, in the process that called it.
            The same error, told by whom, in the others; OtherProcessError if it is none of this package.
            CheckpointTimeoutError: a process did not come, or got no further, in time; names it.
        """

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """What process 0 says; it does not wait for the others.

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

    def within(self, name: str, after: Coordinator | None = None) -> Coordinator:
        """Itself."""
        return self

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
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
        name: what all its keys begin with.
    """

    def __init__(
        self,
        values: KeyValues,
        process: int,
        processes: int,
        timeout_s: float = BARRIER_TIMEOUT_S,
        name: str = "jaxckpt",
    ) -> None:
        self.process, self.processes = process, processes
        self._values, self._timeout_s, self._name = values, timeout_s, name
        self._met = 0  # how many times
        self._finished: list[str] = []  # at process 0: whose keys are still there

    def within(self, name: str, after: Coordinator | None = None) -> Coordinator:
        """One with an order of its own."""
        inner = ManyProcesses(self._values, self.process, self.processes, self._timeout_s, f"{self._name}/{name}")
        if isinstance(after, ManyProcesses):
            inner._finished = [after._name]
        return inner

    def exchange(
        self,
        doing: str,
        give: Callable[[], bytes],
        merge: Callable[[Sequence[bytes]], bytes] = always,
        moved: Moved | None = None,
    ) -> bytes:
        """As the protocol says."""
        meeting = self._meeting(doing, moved)
        if self.process:
            return meeting.take_part(give)

        def act() -> bytes:
            mine = give()
            others = meeting.collect()
            for folder in self._finished:  # who is here has left these
                self._values.delete(folder)
            self._finished = []
            return merge([mine, *others])

        return self._held(meeting, act)

    def broadcast(self, doing: str, say: Callable[[], bytes], moved: Moved | None = None) -> bytes:
        """As the protocol says."""
        meeting = self._meeting(doing, moved)
        return meeting.hear() if self.process else self._held(meeting, say)

    def barrier(self, doing: str) -> None:
        """As the protocol says."""
        self.exchange(doing, lambda: b"")

    def _meeting(self, doing: str, moved: Moved | None) -> Meeting:
        self._met += 1
        folder = f"{self._name}/{self._met}"
        return Meeting(self._values, folder, self.process, self.processes, doing, self._timeout_s, moved)

    def _held(self, meeting: Meeting, act: Callable[[], bytes]) -> bytes:
        try:
            return meeting.preside(act)
        finally:
            self._finished.append(meeting.folder)
