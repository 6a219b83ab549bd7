"""Neighbours: whether all processes of a job run on one machine, and memory there in which they see each other.

Near memory: what each process of a machine gives in memory that the others see, and how far each is with it.

Mailboxes: short messages from process to process of one machine, through pipes that are found under /proc.

Shared memory: what one process has read, where other processes of its machine may look at it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import struct
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.store.process_identity import descriptor_path, machine_id
from jaxckpt_train.store.segment import ALIGNMENT

NAME = "jaxckpt"
TOKEN_BYTES = 16
MESSAGE_BYTES = 32
"""Of each message. It comes whole: the system puts up to PIPE_BUF bytes, never less than 512, into a pipe at once."""
_STATE = struct.Struct("<IQQ")  # number of a process, how much it has given, and taken
SLICE_S = 0.5
_FAR = b""
_BLIND = b"!"


class _MemoryAddress(msgspec.Struct, array_like=True):
    pid: int
    descriptor: int
    size: int
    token: bytes


class SharedMemory:
    """Anonymous memory (Linux's memfd). It is nowhere in a file system, and goes when the last process lets go of it.

    Who may open another process's descriptors under /proc, as processes of one user may, can look at it, but neither
    change its size nor, as it is given out here, what is in it.

    Args:
        size: bytes.

    Attributes:
        data: flat uint8, writable, at a page boundary.
        address: by which others find it, as long as it is not hidden.

    Raises:
        OSError: this system has no such memory, or gives none.
    """

    _descriptor = -1

    def __init__(self, size: int) -> None:
        self._descriptor = _sealed_memory(ALIGNMENT + size)
        area = mmap.mmap(self._descriptor, ALIGNMENT + size)
        token = os.urandom(TOKEN_BYTES)
        area[:TOKEN_BYTES] = token
        self.data = np.frombuffer(area, np.uint8, size, ALIGNMENT)
        self.address = msgspec.msgpack.encode(_MemoryAddress(os.getpid(), self._descriptor, size, token))

    def hide(self) -> None:
        """Nobody finds it any more; who has, keeps it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = hide  # an error or an interrupt may lose it on its way to who made it

    def let_go(self) -> None:
        """This process has it no more, unless somebody uses `data` still; who has found it keeps it."""
        self.data = np.empty(0, np.uint8)


def _sealed_memory(size: int) -> int:
    """A descriptor of memory whose size stays."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise OSError(errno.ENOSYS, "no memory that others can look at on this system")


def seen(address: bytes) -> np.ndarray:
    """The memory of another process: flat uint8, not writable.

    Raises:
        OSError: it cannot be seen from here, as from another container.
    """
    there = msgspec.msgpack.decode(address, type=_MemoryAddress)
    path = descriptor_path(there.pid, there.descriptor, f"/memfd:{NAME}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != ALIGNMENT + there.size:
            raise OSError(errno.ENOENT, "other memory than was told", path)
        area = mmap.mmap(descriptor, ALIGNMENT + there.size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if area[:TOKEN_BYTES] != there.token:
        raise OSError(errno.ENOENT, "other memory than was told", path)
    return np.frombuffer(area, np.uint8, there.size, ALIGNMENT)


class _PipeAddress(msgspec.Struct, array_like=True):
    pid: int
    descriptor: int
    inode: int


class Mailbox:
    """Where one process hears from others. What they did before they sent is to be seen once the message has come.

    Attributes:
        address: by which others find it.

    Raises:
        OSError: this system has no such pipes, or gives none.
    """

    _pipe: tuple[int, ...] = ()

    def __init__(self) -> None:
        if not hasattr(os, "pipe2"):
            raise OSError(errno.ENOSYS, "no pipes that others find on this system")
        self._pipe = self._reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ready = select.poll()
        self._ready.register(self._reading, select.POLLIN)
        self.address = msgspec.msgpack.encode(_PipeAddress(os.getpid(), writing, os.fstat(writing).st_ino))

    def hear(self, timeout_s: float) -> list[bytes]:
        """The messages that have come, in their order; waits for the first one, for so many seconds at most."""
        if not self._ready.poll(timeout_s * 1000):
            return []
        with contextlib.suppress(BlockingIOError):
            came = os.read(self._reading, MESSAGE_BYTES * 1024)
            return [came[at : at + MESSAGE_BYTES] for at in range(0, len(came), MESSAGE_BYTES)]
        return []

    def close(self) -> None:
        """Nobody is heard any more."""
        pipe, self._pipe = self._pipe, ()
        for each in pipe:
            os.close(each)

    __del__ = close  # an interrupt may lose it on its way to who made it


class Channel:
    """To the mailbox of another process.

    Args:
        address: of the mailbox.

    Raises:
        OSError: it cannot be found from here, as from another container.
    """

    _descriptor: int | None = None

    def __init__(self, address: bytes) -> None:
        self._lock = threading.Lock()  # a descriptor that was closed may be another file's the next moment
        there = msgspec.msgpack.decode(address, type=_PipeAddress)
        path = descriptor_path(there.pid, there.descriptor, f"pipe:[{there.inode}]")
        # Also for reading, though nothing is read: a pipe that nobody can read ends who does not ignore SIGPIPE.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)

    def send(self, message: bytes) -> None:
        """Send what is no longer than a message, from any thread; to nobody if the mailbox, or this, is closed.

        Raises:
            BlockingIOError: there is no room: many messages lie there already.
        """
        with self._lock:
            if self._descriptor is not None:
                os.write(self._descriptor, message.ljust(MESSAGE_BYTES, b"\0"))

    def close(self) -> None:
        """Send no more."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:  # else an interrupt may have come before there was a lock
            self.close()


class ColocatedMemory:
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
        self._bell = Channel(self._mailbox.address)
        self._open.callback(self._bell.close)
        self.address = msgspec.msgpack.encode([self._own.address, self._mailbox.address])
        self.process, self.data = 0, list[np.ndarray]()
        self._letters, self._owed = dict[int, Channel](), set[int]()
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
                self._letters[number] = Channel(mailbox)
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


class ColocatedProcesses(NamedTuple):
    """What the processes of a job are to each other.

    Attributes:
        are_near: whether all run on one machine.
        memory: in which they see each other. None: not all see that of all others, as from containers that are shut off
            from each other.
    """

    are_colocated: bool
    memory: ColocatedMemory | None


class _Here(msgspec.Struct, array_like=True):
    machine: str
    address: bytes


def neighbours(order: Coordinator, size: int) -> ColocatedProcesses:
    """What they are; all of them ask, each for memory of `size` bytes of its own. Whoever gets some closes it.

    Raises:
        As `Coordinator.exchange`.
    """
    with contextlib.ExitStack() as unless_joined:
        own: ColocatedMemory | None = None
        with contextlib.suppress(OSError):
            own = ColocatedMemory(size)
            unless_joined.callback(own.close)
        with contextlib.ExitStack() as hidden:
            if own is not None:
                hidden.callback(own.hide)
            here = _Here(machine_id(), b"" if own is None else own.address)
            doing = "asking on which machines the processes of this job are"
            told = order.exchange(doing, lambda: msgspec.msgpack.encode(here), _on_one_machine)
            if told == _FAR:
                return ColocatedProcesses(False, None)
            addresses = msgspec.msgpack.decode(told, type=list[bytes])
            if own is None or not all(addresses):
                return ColocatedProcesses(True, None)

            def look() -> bytes:
                try:
                    own.join(addresses, order.process)
                except OSError:
                    return _BLIND
                return b""

            if order.exchange("looking at the memory of the processes of this job", look, b"".join):
                return ColocatedProcesses(True, None)
        unless_joined.pop_all()
        return ColocatedProcesses(True, own)


def _on_one_machine(told: Sequence[bytes]) -> bytes:
    found = [msgspec.msgpack.decode(each, type=_Here) for each in told]
    if not found[0].machine or len({each.machine for each in found}) > 1:
        return _FAR
    return msgspec.msgpack.encode([each.address for each in found])
