"""Read files of other hosts over TCP: a server of one directory, and its clients, the other processes of the job.

The server only reads, and only regular files below its directory. A connection begins with a handshake, in which both
sides prove that they know the token of the job without sending it. Then the client sends requests, and the server
answers each with one response. Request and response are frames:

    magic (4 bytes), number (8), kind (1), size of the body (4), size of the payload (4), digest of the payload (16),
    code of the header and the body (16); body (msgpack); payload (bytes of a file)

The code is a keyed BLAKE2b with a key of this connection and direction, and the number counts the frames. So a frame of
another job, of another connection, or one sent twice is refused before its payload is read, and every payload is
checked against its digest. Nothing is encrypted: the network must be one that the job trusts with its data.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import DAMAGE, storage_error
from jaxckpt_train.store.backends.local import LocalSource, open_local

MAX_BODY_BYTES, MAX_PAYLOAD_BYTES = 64 << 10, 4 << 20
MAX_CONNECTIONS = 64  # and as many newcomers: connections that have not sent a request
HANDSHAKE_S = 10.0
IDLE_S = 600.0  # then the server closes a connection
_PAUSE_S = 0.05
_NEWCOMER_PAUSE_S = 0.01  # if many strangers connect, each newcomer has 64 times this for its handshake
_MAX_OFFSET = (1 << 63) - 1 - MAX_PAYLOAD_BYTES  # the system has no larger ones
_MAGIC = b"JCK1"
_HEADER = struct.Struct(">4sQBII16s16s")
_SIGNED = _HEADER.size - 16
_NONCE_BYTES = 32
_REQUEST, _CONTENT, _ERROR = 1, 2, 3
_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


class FrameError(Exception):
    """What arrived is no frame of this connection, or ends too early."""


class _EndedError(FrameError):
    pass


class _Request(msgspec.Struct, array_like=True):
    """Read from a file. `path` is relative to the directory of the server; no bytes: only ask for its size.

    `is_unchecked`: send the bytes without a digest, as the kernel takes them from the file.
    """

    path: str
    offset: int
    bytes: int
    is_unchecked: bool = False


class _Content(msgspec.Struct, array_like=True):
    """What a file has; the bytes are the payload."""

    size: int
    modified_ns: int


class _Failure(msgspec.Struct, array_like=True):
    """Why a file could not be read. `errno` 0: it ends before the bytes that were asked for."""

    errno: int
    reason: str


class Connection:
    """Frames over a socket, after the handshake. Raises FrameError, and OSError of the socket."""

    def __init__(self, link: socket.socket, token: bytes, *, is_server: bool) -> None:
        self._link = link
        nonces = secrets.token_bytes(_NONCE_BYTES), b""
        own, other = b"server" if is_server else b"client", b"client" if is_server else b"server"
        link.sendall(_MAGIC + nonces[0])
        magic, theirs = self._received(len(_MAGIC)), self._received(_NONCE_BYTES)
        if magic != _MAGIC:
            raise FrameError("the other side does not speak this protocol")
        pair = nonces[0] + theirs if is_server else theirs + nonces[0]
        link.sendall(_keyed(token, b"proof of " + own + pair))
        if not hmac.compare_digest(self._received(_NONCE_BYTES), _keyed(token, b"proof of " + other + pair)):
            raise FrameError("the other side does not know the token of this job")
        self._own_key, self._their_key = (
            _keyed(token, b"key of " + own + pair),
            _keyed(token, b"key of " + other + pair),
        )
        self._sent = self._seen = 0

    def send(self, kind: int, body: msgspec.Struct, payload: np.ndarray | None = None) -> None:
        """Send one frame; `payload` is a flat uint8 array of at most `MAX_PAYLOAD_BYTES`."""
        content = memoryview(b"" if payload is None else payload)
        self._send_head(kind, body, len(content), xxhash.xxh3_128_digest(content))
        if len(content):
            self._link.sendall(content)

    def send_from(self, source: LocalSource, body: msgspec.Struct, offset: int, nbytes: int) -> None:
        """Send content whose payload is a part of a file, without its digest."""
        self._send_head(_CONTENT, body, nbytes, b"")
        with source.opened() as file:
            if self._link.sendfile(file, offset, nbytes) != nbytes:
                raise FrameError("a file became shorter")

    def _send_head(self, kind: int, body: msgspec.Struct, payload_bytes: int, digest: bytes) -> None:
        encoded = msgspec.msgpack.encode(body)
        start = _HEADER.pack(_MAGIC, self._sent, kind, len(encoded), payload_bytes, digest, b"")[:_SIGNED]
        self._sent += 1
        self._link.sendall(start + _code(self._own_key, start + encoded) + encoded)

    def receive(self, into: np.ndarray | None = None, *, is_unchecked: bool = False) -> tuple[int, bytes]:
        """Receive one frame; return its kind and its body. Its payload must fill `into` (None: have no bytes)."""
        header = self._received(_HEADER.size)
        magic, number, kind, body_bytes, payload_bytes, digest, code = _HEADER.unpack(header)
        expected = 0 if into is None or kind == _ERROR else len(into)
        if magic != _MAGIC or body_bytes > MAX_BODY_BYTES or payload_bytes != expected:
            raise FrameError("the frame has no valid header")
        body = self._received(body_bytes)
        if number != self._seen or not hmac.compare_digest(code, _code(self._their_key, header[:_SIGNED] + body)):
            raise FrameError("the frame does not belong to this connection, or was sent before")
        self._seen += 1
        if into is not None and expected:
            self._fill(memoryview(into), "the other side has closed the connection in the middle of a file")
            if not is_unchecked and xxhash.xxh3_128_digest(into) != digest:
                raise FrameError("the bytes of a file changed on their way")
        return kind, body

    def _received(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview, broken: str | None = None) -> None:
        """Receive bytes. `broken`: what it means for the whole frame that the other side ends it before them."""
        while view:
            done = self._link.recv_into(view)
            if not done:
                raise FrameError(broken) if broken else _EndedError("the other side has closed the connection")
            view = view[done:]

    def close(self) -> None:
        """Close the socket."""
        self._link.close()


def _keyed(token: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_NONCE_BYTES, key=token[:64]).digest()


def _code(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, key=key).digest()


class FileServer:
    """Serves the regular files below a directory to clients that know the token, from the constructor to `close`.

    It listens on one address of this host, on a free port. A connection costs a thread and at most 4 MiB. To make room,
    the server closes the newcomer that is the oldest, or the connection that has waited longest for a request. A client
    connects again.

    Attributes:
        address: the address and the port.
    """

    def __init__(self, directory: str, token: bytes, host: str, port: int = 0) -> None:
        self._directory, self._token = directory, token
        try:
            self._listener = socket.create_server((host, port), family=_family(host), backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise storage_error(error.errno or errno.EIO, f"listen on {host}:{port}", directory, str(error)) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        _servers.add(self)
        self._open, self._changed, self._closed = set[socket.socket](), threading.Condition(), threading.Event()
        self._newcomers, self._idle = dict[socket.socket, None](), dict[socket.socket, None]()  # by age
        self._refused = 0
        threading.Thread(target=self._accept, name="jaxckpt-peers", daemon=True).start()

    def close(self) -> None:
        """Stop serving; clients that are reading get an error."""
        with self._changed:
            self._closed.set()
            links = [self._listener, *self._open]
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                link, address = self._listener.accept()
            except (OSError, MemoryError):  # closed; or too many open files, and a client has to wait
                if self._closed.wait(_PAUSE_S):
                    return
                continue
            with self._changed:
                if not self._changed.wait_for(lambda: len(self._newcomers) < MAX_CONNECTIONS, _NEWCOMER_PAUSE_S):
                    self._evict(self._newcomers)
                if self._closed.is_set():
                    link.close()
                    return
                self._open.add(link)
                self._newcomers[link] = None
            name = f"jaxckpt-peer-{link.fileno()}"
            thread = threading.Thread(target=self._serve, args=(link, address), name=name, daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # no more threads for now; the client connects again
                _log.warning("%s: a connection from %s was closed: %s", self._directory, address[0], error)
                with contextlib.closing(link), self._changed:
                    self._drop(link)

    def _serve(self, link: socket.socket, address: tuple[str, int]) -> None:
        try:
            with contextlib.closing(link):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.settimeout(HANDSHAKE_S)
                connection = Connection(link, self._token, is_server=True)
                memory = np.empty(0, np.uint8)
                while True:
                    kind, body = connection.receive()
                    if kind != _REQUEST:
                        raise FrameError(f"expected a request, found a frame of kind {kind}")
                    self._admit(link)
                    link.settimeout(IDLE_S)
                    memory = self._answer(connection, _decoded(body, _Request), memory)
                    with self._changed:
                        self._idle[link] = None
        except (FrameError, MemoryError) as error:
            if not self._closed.is_set() and not isinstance(error, _EndedError):
                self._warn_of_refused(address[0], str(error) or "no memory")
        except OSError as error:
            if error.errno == errno.EIO:  # of the disk; otherwise the client is gone, and reports the error
                _log.warning("%s: a file for %s could not be read: %s", self._directory, address[0], error)
        finally:
            with self._changed:
                self._drop(link)

    def _warn_of_refused(self, address: str, why: str) -> None:
        """Log the 1st, 2nd, 4th, 8th ... refused connection."""
        with self._changed:
            self._refused += 1
            number = self._refused
        if number & (number - 1) == 0:
            text = "%s: a connection from %s was refused (number %d): %s"
            _log.warning(text, self._directory, address, number, why)

    def _admit(self, link: socket.socket) -> None:
        """Let a connection that has sent a request have its answer. Raises FrameError: there is no room for it."""
        with self._changed:
            if link in self._newcomers and len(self._open) - len(self._newcomers) >= MAX_CONNECTIONS:
                self._evict(self._idle)
            if link not in self._open:
                raise _EndedError("closed to make room for another connection")
            self._newcomers.pop(link, None)
            self._idle.pop(link, None)
            self._changed.notify()

    def _evict(self, links: dict[socket.socket, None]) -> None:
        """Close the first of these connections. Raises FrameError: there is none."""
        if not links:
            raise _EndedError("all connections are in use")
        link = next(iter(links))
        self._drop(link)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # wakes its thread

    def _drop(self, link: socket.socket) -> None:
        self._open.discard(link)
        self._newcomers.pop(link, None)
        self._idle.pop(link, None)
        self._changed.notify()

    def _answer(self, connection: Connection, request: _Request, memory: np.ndarray) -> np.ndarray:
        """Answer one request; return the memory for the next one."""
        try:
            is_readable = 0 <= request.bytes <= MAX_PAYLOAD_BYTES and 0 <= request.offset <= _MAX_OFFSET
            if not _is_below(request.path) or not is_readable:
                raise storage_error(errno.EINVAL, f"read {request.bytes} bytes at {request.offset}", request.path[:200])
            with contextlib.closing(open_local(self._directory, request.path)) as source:
                answer = _Content(source.size, source.modified_ns)
                if request.is_unchecked and 0 < request.bytes <= source.size - request.offset:
                    connection.send_from(source, answer, request.offset, request.bytes)
                    return memory
                if len(memory) < request.bytes:
                    memory = _memory(request)
                data = memory[: request.bytes]
                if request.bytes:
                    source.read_into(request.offset, data, request.bytes)
        except StorageError as error:
            connection.send(_ERROR, _Failure(error.errno or errno.EIO, str(error.strerror)[:1000]))
        except CorruptCheckpointError as error:
            connection.send(_ERROR, _Failure(0, str(error)[:1000]))
        else:
            connection.send(_CONTENT, answer, data)
        return memory


_servers: weakref.WeakSet[FileServer] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked child, which has no thread that would answer."""
    for server in list(_servers):
        for link in (server._listener, *server._open):
            link.close()


os.register_at_fork(after_in_child=_close_in_child)


class Peer:
    """The files that the process `process` of the job serves. Every failure is a StorageError; thread-safe.

    Args:
        timeout_s: how many seconds a connection may take, or make no progress.
    """

    def __init__(self, process: int, address: tuple[str, int], token: bytes, timeout_s: float) -> None:
        self.process, self._address, self._token, self._timeout_s = process, address, token, timeout_s
        self._idle, self._lock = list[Connection](), threading.Lock()

    def open(self, path: str, *, is_unchecked: bool = False) -> PeerSource:
        """Open a file by its path below the directory of the server.

        `is_unchecked`: the caller compares all bytes with digests; they are sent without digests, which is faster.
        """
        content = self._ask(_Request(path, 0, 0), None)
        return PeerSource(self, path, content.size, content.modified_ns, is_unchecked)

    def read_into(self, path: str, offset: int, data: np.ndarray, *, is_unchecked: bool = False) -> None:
        """Fill a flat uint8 array. Raises CorruptCheckpointError: the file is shorter."""
        for at in range(0, len(data), MAX_PAYLOAD_BYTES):
            piece = data[at : at + MAX_PAYLOAD_BYTES]
            self._ask(_Request(path, offset + at, len(piece), is_unchecked), piece)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, request: _Request, into: np.ndarray | None) -> _Content:
        where, end_s = f"{self._address[0]}:{self._address[1]}/{request.path}", time.monotonic() + self._timeout_s
        with self._lock:
            connection, is_fresh = (self._idle.pop(), False) if self._idle else (None, True)
        while True:
            try:
                connection = connection or self._connect()
                connection.send(_REQUEST, request)
                kind, body = connection.receive(into, is_unchecked=request.is_unchecked)
            except (OSError, FrameError) as error:
                if connection is not None:
                    connection.close()
                is_closed = isinstance(error, _EndedError | ConnectionResetError | BrokenPipeError)
                if not is_fresh or (is_closed and time.monotonic() < end_s):  # the server may have had to make room
                    time.sleep(_PAUSE_S if is_fresh else 0.0)
                    connection, is_fresh = None, True
                    continue
                code = error.errno if isinstance(error, OSError) else None
                code = errno.ECONNABORTED if code is None or code in DAMAGE else code  # the file may be intact
                reason = f"process {self.process} does not deliver it: {error or type(error).__name__}"
                raise storage_error(code, "read the file of another host", where, reason) from error
            with self._lock:
                self._idle.append(connection)
            if kind == _CONTENT:
                return _decoded(body, _Content)
            failure = _decoded(body, _Failure)
            if failure.errno == 0:
                raise CorruptCheckpointError(f"{where}: {failure.reason}")
            raise storage_error(failure.errno, "read the file of another host", where, failure.reason)

    def _connect(self) -> Connection:
        link = socket.create_connection(self._address, self._timeout_s)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Connection(link, self._token, is_server=False)
        except BaseException:
            link.close()
            raise


class PeerSource:
    """A file of another host, opened for reading; a `Source`."""

    alignment = 1

    def __init__(self, peer: Peer, path: str, size: int, modified_ns: int, is_unchecked: bool) -> None:
        self._peer, self._path, self.size, self.modified_ns = peer, path, size, modified_ns
        self._is_unchecked = is_unchecked

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        self._peer.read_into(self._path, offset, data[:needed], is_unchecked=self._is_unchecked)

    def close(self) -> None:
        """Nothing is held."""


def local_address(towards: str) -> str:
    """The address of this host on the interface through which another one is reached; no packet is sent."""
    refused: OSError | None = None
    for family in (socket.AF_INET6,) if ":" in towards else (socket.AF_INET, socket.AF_INET6):  # a name may have both
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))
                found: str = probe.getsockname()[0]
                return found
        except OSError as error:
            refused = refused or error
    assert refused is not None
    code = errno.EADDRNOTAVAIL if isinstance(refused, socket.gaierror) else refused.errno or errno.EIO
    raise storage_error(code, "find the interface of the job", towards, str(refused)) from refused


def address_among(addresses: Sequence[str], number: int) -> str:
    """The address of this number, or another one of this host if only this host reaches it.

    The name of a host may lead to 127.0.1.1 on the host itself.
    """
    found = addresses[number]
    others = [each for each in addresses if not _is_loopback(each)]
    return local_address(others[0]) if others and _is_loopback(found) else found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a name


def _memory(request: _Request) -> np.ndarray:
    try:
        return np.empty(request.bytes, np.uint8)
    except MemoryError as error:
        raise storage_error(errno.ENOMEM, f"read {request.bytes} bytes", request.path) from error


def _is_below(path: str) -> bool:
    return len(path) < MAX_BODY_BYTES and "\0" not in path and all(n not in ("", ".", "..") for n in path.split("/"))


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"the frame has no {kind.__name__}: {error}") from error


def _family(host: str) -> Literal[socket.AddressFamily.AF_INET, socket.AddressFamily.AF_INET6]:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
