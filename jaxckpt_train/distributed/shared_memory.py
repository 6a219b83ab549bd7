"""Shared memory of the processes of a job that run on one machine, and messages about how far each process is.

Memory is a Linux memfd, messages go through pipes; other processes find both under /proc.
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
MESSAGE_BYTES = 32  # it arrives whole: a pipe takes up to PIPE_BUF bytes (at least 512) in one piece
_STATE = struct.Struct("<IQQ")  # number of a process, how many windows it has given and taken
SLICE_S = 0.5


class SharedMemory:
    """Anonymous memory (a Linux memfd). It ends with the last process that maps it.

    Other processes of the same user can read it through `open_memory`, but not change its size or content.

    Attributes:
        data: flat uint8, writable, at a page boundary.
        address: by which others find it, until it is hidden.
    """

    _descriptor = -1

    def __init__(self, size: int) -> None:
        self._descriptor = _sealed_memory(ALIGNMENT + size)
        area = mmap.mmap(self._descriptor, ALIGNMENT + size)
        token = os.urandom(TOKEN_BYTES)
        area[:TOKEN_BYTES] = token
        self.data = np.frombuffer(area, np.uint8, size, ALIGNMENT)
        self.address = msgspec.msgpack.encode((os.getpid(), self._descriptor, size, token))

    def hide(self) -> None:
        """Make it impossible to find; processes that have mapped it keep it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = hide  # an error or an interrupt may drop the object before its maker has it

    def release(self) -> None:
        """Drop this process's mapping, unless `data` is still in use elsewhere; other processes keep theirs."""
        self.data = np.empty(0, np.uint8)


def _sealed_memory(size: int) -> int:
    """Create memory whose size is fixed, and return its descriptor."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise OSError(errno.ENOSYS, "this system has no memory that other processes can map (memfd)")


def open_memory(address: bytes) -> np.ndarray:
    """Map the memory of another process: flat uint8, not writable. OSError: it cannot be reached from here."""
    pid, number, size, token = msgspec.msgpack.decode(address, type=tuple[int, int, int, bytes])
    path = descriptor_path(pid, number, f"/memfd:{NAME}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size == ALIGNMENT + size:
            area = mmap.mmap(descriptor, ALIGNMENT + size, prot=mmap.PROT_READ)
            if area[:TOKEN_BYTES] == token:
                return np.frombuffer(area, np.uint8, size, ALIGNMENT)
    finally:
        os.close(descriptor)
    raise OSError(errno.ENOENT, "found other memory than was announced", path)


class Mailbox:
    """Receives messages from other processes, which find it by its `address`.

    All memory that a process wrote before it sent a message is visible on receipt.
    """

    _pipe: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._pipe = self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._ready = select.poll()
        self._ready.register(self._reading, select.POLLIN)
        self.address = msgspec.msgpack.encode((os.getpid(), writing, os.fstat(writing).st_ino))

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return the messages that have arrived, in order; wait at most `timeout_s` seconds for the first one."""
        if not self._ready.poll(timeout_s * 1000):
            return []
        with contextlib.suppress(BlockingIOError):
            came = os.read(self._reading, MESSAGE_BYTES * 1024)
            return [came[at : at + MESSAGE_BYTES] for at in range(0, len(came), MESSAGE_BYTES)]
        return []

    def close(self) -> None:
        """Stop receiving."""
        pipe, self._pipe = self._pipe, ()
        for each in pipe:
            os.close(each)

    __del__ = close  # an interrupt may drop the object before its maker has it


class Channel:
    """Sends messages to the mailbox with this address. OSError: it cannot be reached, such as in another container."""

    _descriptor: int | None = None

    def __init__(self, address: bytes) -> None:
        self._lock = threading.Lock()  # the number of a closed descriptor may belong to another file a moment later
        pid, number, inode = msgspec.msgpack.decode(address, type=tuple[int, int, int])
        path = descriptor_path(pid, number, f"pipe:[{inode}]")
        # Opened for reading too, although nothing is read: writing to a pipe without readers raises SIGPIPE.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)

    def send(self, message: bytes) -> None:
        """Send at most one message, from any thread; it is dropped if the mailbox or this channel is closed.

        Raises:
            BlockingIOError: the pipe is full of unread messages.
        """
        with self._lock:
            if self._descriptor is not None:
                os.write(self._descriptor, message.ljust(MESSAGE_BYTES, b"\0"))

    def close(self) -> None:
        """Stop sending."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:  # otherwise an interrupt may have come before the lock was made
            self.close()


class ColocatedMemory:
    """Memory of all processes of a job, which they can read, and how far each of them is with giving and taking.

    Attributes:
        address: by which others find the memory of this process, until it is hidden.
        process: number of this process, once it has joined.
        data: of each process in order: flat uint8; this process may write into its own. Empty before it has joined.
        given, taken: how much each process has given, and taken of each, by its latest message.
    """

    def __init__(self, size: int) -> None:
        self._own, self._open = SharedMemory(size), contextlib.ExitStack()
        self._open.callback(self._own.release)
        self._mailbox = Mailbox()
        self._open.callback(self._mailbox.close)
        self._wake_channel = Channel(self._mailbox.address)
        self._open.callback(self._wake_channel.close)
        self.address = msgspec.msgpack.encode([self._own.address, self._mailbox.address])
        self.process, self.data = 0, list[np.ndarray]()
        self._channels, self._behind = dict[int, Channel](), set[int]()
        self.given, self.taken = list[int](), list[int]()

    def join(self, addresses: Sequence[bytes], process: int) -> None:
        """Map the memory of all processes, given their addresses in order and the number of this process."""
        self.process, self.given, self.taken = process, [0] * len(addresses), [0] * len(addresses)
        for number, address in enumerate(addresses):
            memory, mailbox = msgspec.msgpack.decode(address, type=list[bytes])
            self.data.append(self._own.data if number == process else open_memory(memory))
            if number != process:
                self._channels[number] = Channel(mailbox)
                self._open.callback(self._channels[number].close)

    def hide(self) -> None:
        """Make it impossible to find; processes that have joined keep it."""
        self._own.hide()

    def close(self) -> None:
        """Release the memory and the pipes; a second call does nothing."""
        self.data.clear()
        self._open.close()

    def announce(self, given: int, taken: int) -> None:
        """Announce how much this process has given, and how much it has taken of each; both only grow."""
        self.given[self.process], self.taken[self.process] = given, taken
        self._behind.update(self._channels)
        self._notify_behind()

    def has_unnotified(self) -> bool:
        """Return whether a process that could not be notified still waits for data; `wait` tries again."""
        return any(self.taken[process] < self.given[self.process] for process in self._behind)

    def _notify_behind(self) -> None:
        state = _STATE.pack(self.process, self.given[self.process], self.taken[self.process])
        for process in list(self._behind):
            with contextlib.suppress(BlockingIOError):
                self._channels[process].send(state)
                self._behind.discard(process)

    def wake(self) -> None:
        """End the current or the next wait of this process; from any thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe holds enough messages to wake it
            self._wake_channel.send(b"")

    def wait(self) -> None:
        """Wait for a message or `wake`; for half a second at most."""
        self._notify_behind()
        for message in self._mailbox.receive(SLICE_S):
            if message.strip(b"\0"):
                process, given, taken = _STATE.unpack_from(message)
                self.given[process], self.taken[process] = given, taken


class ColocatedProcesses(NamedTuple):
    """How the processes of a job are placed."""

    are_colocated: bool  # whether all of them run on one machine
    memory: ColocatedMemory | None  # None: a process cannot read that of another, such as in another container


def find_colocated_processes(coordinator: Coordinator, size: int) -> ColocatedProcesses:
    """Find out how the processes are placed. All of them call this, each for `size` bytes; the caller closes them."""
    own: ColocatedMemory | None = None
    has_joined = False
    try:
        with contextlib.suppress(OSError):
            own = ColocatedMemory(size)
        here = msgspec.msgpack.encode((machine_id(), b"" if own is None else own.address))
        doing = "comparing the machines of the processes of this job"
        addresses = msgspec.msgpack.decode(coordinator.exchange(doing, lambda: here, _on_one_machine), type=list[bytes])
        if own is None or not addresses or not all(addresses):
            return ColocatedProcesses(bool(addresses), None)
        joining = own

        def join() -> bytes:
            try:
                joining.join(addresses, coordinator.process)
            except OSError:
                return b"!"
            return b""

        if coordinator.exchange("mapping the memory of the processes of this job", join, b"".join):
            return ColocatedProcesses(True, None)
        has_joined = True
        return ColocatedProcesses(True, own)
    finally:
        if own is not None:
            own.hide()
            if not has_joined:
                own.close()


def _on_one_machine(results: Sequence[bytes]) -> bytes:
    """Return the addresses of all processes, or none if they run on several machines."""
    found = [msgspec.msgpack.decode(each, type=tuple[str, bytes]) for each in results]
    machines = {machine for machine, _ in found}
    return msgspec.msgpack.encode(
        [address for _, address in found] if len(machines) == 1 and "" not in machines else []
    )
