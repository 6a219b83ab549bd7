"""Mailboxes: short messages from process to process of one machine, through pipes that are found under /proc."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading

import msgspec

from jaxckpt_train.store.machine import descriptor_path

MESSAGE_BYTES = 32
"""Of each message. It comes whole: the system puts up to PIPE_BUF bytes, never less than 512, into a pipe at once."""


class _Address(msgspec.Struct, array_like=True):
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
        self.address = msgspec.msgpack.encode(_Address(os.getpid(), writing, os.fstat(writing).st_ino))

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


class Letters:
    """To the mailbox of another process.

    Args:
        address: of the mailbox.

    Raises:
        OSError: it cannot be found from here, as from another container.
    """

    _descriptor: int | None = None

    def __init__(self, address: bytes) -> None:
        self._lock = threading.Lock()  # a descriptor that was closed may be another file's the next moment
        there = msgspec.msgpack.decode(address, type=_Address)
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
