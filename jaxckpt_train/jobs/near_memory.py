"""Near memory: what each process of a machine gives in memory that the others see, and how far each is with it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxckpt_train.store.mailbox import Letters, Mailbox
from jaxckpt_train.store.shared_memory import SharedMemory, seen

_STATE = struct.Struct("<IQQ")  # number of a process, how much it has given, and taken
SLICE_S = 0.5


class NearMemory:
    """Memory of all processes of a job, and how far each is with what it does there.

    Args:
        size: bytes of each.

    Attributes:
        address: by which others find what is of this process, as long as it is not hidden.
        process: number of this one, once it has joined.
        data: of each process in order: flat uint8; this one may write into its own. Empty before it has joined.

    Raises:
        OSError: this system has no such memory, or gives none.
    """

    def __init__(self, size: int) -> None:
        self._own, self._open = SharedMemory(size), contextlib.ExitStack()
        self._open.callback(self._own.let_go)
        self._mailbox = Mailbox()
        self._open.callback(self._mailbox.close)
        self._bell = Letters(self._mailbox.address)
        self._open.callback(self._bell.close)
        self.address = msgspec.msgpack.encode([self._own.address, self._mailbox.address])
        self.process, self.data = 0, list[np.ndarray]()
        self._letters, self._owed = dict[int, Letters](), set[int]()
        self._given, self._taken = list[int](), list[int]()

    def join(self, addresses: Sequence[bytes], process: int) -> None:
        """Look at the memory of all.

        Args:
            addresses: of each process in order.
            process: number of this one.

        Raises:
            OSError: some is not to be seen from here.
        """
        self.process, self._given, self._taken = process, [0] * len(addresses), [0] * len(addresses)
        for number, address in enumerate(addresses):
            memory, mailbox = msgspec.msgpack.decode(address, type=list[bytes])
            self.data.append(self._own.data if number == process else seen(memory))
            if number != process:
                self._letters[number] = Letters(mailbox)
                self._open.callback(self._letters[number].close)

    def hide(self) -> None:
        """Nobody finds it any more; who has, keeps it."""
        self._own.hide()

    def close(self) -> None:
        """Let go of the memory, and hear and tell nothing more; a second time does nothing."""
        self.data.clear()
        self._open.close()

    def tell(self, given: int, taken: int) -> None:
        """Say how much this process has given, and how much it has taken of each; both only grow."""
        self._given[self.process], self._taken[self.process] = given, taken
        self._owed.update(self._letters)
        self._tell_owed()

    def owes(self) -> bool:
        """Whether somebody could not be told yet of what it has not taken; `wait` tells it as soon as it has room."""
        return any(self._taken[process] < self._given[self.process] for process in self._owed)

    def _tell_owed(self) -> None:
        state = _STATE.pack(self.process, self._given[self.process], self._taken[self.process])
        for process in list(self._owed):
            with contextlib.suppress(BlockingIOError):
                self._letters[process].send(state)
                self._owed.discard(process)

    def has_given(self, process: int) -> int:
        """How much it has given, as far as it was heard of."""
        return self._given[process]

    def all_have_taken(self) -> int:
        """How much all have taken at least."""
        return min(self._taken)

    def wake(self) -> None:
        """End a wait of this process, or the next one; from any thread."""
        with contextlib.suppress(BlockingIOError):  # enough to wake it lies there
            self._bell.send(b"")

    def wait(self) -> None:
        """Until something was told or this process is woken; for half a second at most."""
        self._tell_owed()
        for message in self._mailbox.hear(SLICE_S):
            if message.strip(b"\0"):
                process, given, taken = _STATE.unpack_from(message)
                self._given[process], self._taken[process] = given, taken
