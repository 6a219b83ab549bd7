"""A proxy before an HTTP server on loopback: latency, limited bandwidth, failures, cut bodies, stalls, silence."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import random
import select
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal, Self

from tests.support.objects.loopback import LoopbackServer

PIECE_BYTES = 2**14
_Body = int | Literal["chunked", "to the end"]
_FAILURE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"


@dataclasses.dataclass
class Counters:
    """What the proxy has done.

    Attributes:
        requests: that arrived.
        failed: answered with 503.
        requests_cut: whose body was cut.
        responses_cut: whose response was cut.
        stalled: that stall for ever.
        sent_bytes: of request bodies that were passed on.
        received_bytes: of responses that were passed back.
    """

    requests: int = 0
    failed: int = 0
    requests_cut: int = 0
    responses_cut: int = 0
    stalled: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Bandwidth:
    """A token bucket over all connections together: each transfer is booked after all earlier ones.

    Attributes:
        bytes_per_s: None: unlimited; may change at any time.
        burst_s: after a pause, this many seconds' worth of bytes pass at once.
    """

    def __init__(self, bytes_per_s: float | None, burst_s: float = 0.02) -> None:
        self.bytes_per_s = bytes_per_s
        self.burst_s = burst_s
        self._booked_until = -math.inf
        self._lock = threading.Lock()

    def book(self, size: int, now: float) -> float:
        """Book the transfer of some bytes, and return the seconds to wait before it."""
        with self._lock:
            if self.bytes_per_s is None:
                return 0.0
            self._booked_until = max(self._booked_until, now - self.burst_s) + size / self.bytes_per_s
            return max(self._booked_until - now, 0.0)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What happens to one request; positions of cuts are shares of the body."""

    fail: bool = False
    cut_request: float | None = None
    cut_response: float | None = None
    stall_after: int | None = None


class Proxy:
    """Passes requests on to a server, from `with` to its end; with each client connection goes one to the server.

    Attributes:
        counters: what it has done.
        bandwidth: limits the bodies in both directions together.
        latency_s: added to each request before it is passed on.
        fail: the share of requests that get 503 and are not passed on.
        cut_request: the share of requests with a body that is cut, which ends both connections.
        cut_response: the share of responses that are cut in their body, which ends both connections.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        fail: float = 0.0,
        cut_request: float = 0.0,
        cut_response: float = 0.0,
    ) -> None:
        """Bind a free port, so that the endpoint is known. The attributes may be changed at any time.

        Args:
            endpoint: of the server; its path is ignored, see `Access.through`.
            seed: of the draws, in the order in which requests arrive.
            latency_s: see the attribute.
            bytes_per_s: see `Bandwidth`.
            fail: see the attribute.
            cut_request: see the attribute.
            cut_response: see the attribute.
        """
        self.counters = Counters()
        self.bandwidth = Bandwidth(bytes_per_s)
        self.latency_s = latency_s
        self.fail = fail
        self.cut_request = cut_request
        self.cut_response = cut_response
        parts = urllib.parse.urlsplit(endpoint)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._random = random.Random(seed)
        self._stalls: list[int] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._passing = threading.Event()
        self._passing.set()
        self._server = _ProxyServer(self)

    @property
    def endpoint(self) -> str:
        """The URL of the proxy, without the path of the server's endpoint."""
        return self._server.address

    def stall_next(self, after_bytes: int = 0) -> None:
        """Let one connection stall for ever at its next request.

        It stalls after this many bytes of the request's body or, if that is not longer, of the response.
        """
        with self._lock:
            self._stalls.append(after_bytes)

    def turn_silent(self) -> None:
        """Accept connections and requests, but pass nothing on or back, until `resume`."""
        self._passing.clear()

    def resume(self) -> None:
        """Pass everything that waits since `turn_silent`."""
        self._passing.set()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._passing.set()
        self._server.stop()

    def plan(self) -> _Plan:
        """Draw what happens to the next request."""
        with self._lock:
            self.counters.requests += 1
            drawn, position = self._random.random(), self._random.random()
            if self._stalls:
                return _Plan(stall_after=self._stalls.pop(0))
            if drawn < self.fail:
                return _Plan(fail=True)
            drawn -= self.fail
            if drawn < self.cut_request:
                return _Plan(cut_request=position)
            drawn -= self.cut_request
            return _Plan(cut_response=position) if drawn < self.cut_response else _Plan()

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            setattr(self.counters, counter, getattr(self.counters, counter) + amount)

    def wait(self, seconds: float) -> None:
        """Wait, and then until the proxy is not silent.

        Raises:
            ConnectionAbortedError: the proxy has ended meanwhile.
        """
        if seconds > 0:
            self._ended.wait(None if math.isinf(seconds) else seconds)
        self._passing.wait()
        if self._ended.is_set():
            raise ConnectionAbortedError("the proxy has ended")

    def connect(self) -> socket.socket:
        """Return a new connection to the server."""
        upstream = socket.create_connection(self._upstream)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.track(upstream)
        return upstream

    def disconnect(self, upstream: socket.socket) -> None:
        """Close a connection to the server."""
        self._server.untrack(upstream)
        upstream.close()


class _ProxyServer(LoopbackServer):
    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(_Connection, 0, "proxy")


@dataclasses.dataclass(frozen=True)
class _Head:
    """The lines of a request or response before its body."""

    lines: list[bytes]
    fields: dict[str, str]

    @property
    def body(self) -> _Body | None:
        """How the body ends; None: the head does not say."""
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            return "chunked"
        length = self.fields.get("content-length")
        return None if length is None else int(length)

    @property
    def status(self) -> bytes:
        return self.lines[0].split()[1]

    @property
    def ends_connection(self) -> bool:
        return self.fields.get("connection", "").lower() == "close" or b"HTTP/1.0" in self.lines[0]

    def text(self, without: str = "-") -> bytes:
        """Return the head as it is sent, without one of its fields."""
        kept = [line for line in self.lines if not line.lower().startswith(f"{without}:".encode())]
        return b"".join([*kept, b"\r\n"])


class _Connection(socketserver.StreamRequestHandler):
    """One client connection, and the connection to the server that goes with it."""

    disable_nagle_algorithm = True
    server: _ProxyServer

    def setup(self) -> None:
        super().setup()
        self._proxy = self.server.proxy
        self._upstream: socket.socket | None = None
        self._replies: io.BufferedIOBase | None = None

    def handle(self) -> None:
        while (head := _read_head(self.rfile)) is not None:
            if not self._exchange(head, self._proxy.plan()):
                return

    def finish(self) -> None:
        self._disconnect()
        super().finish()

    def _exchange(self, head: _Head, plan: _Plan) -> bool:
        """Pass on a request and its response; return whether the connection goes on."""
        self._proxy.wait(self._proxy.latency_s)
        body = head.body or 0
        if plan.fail:
            return self._fail(head, body)
        if "expect" in head.fields:
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        upstream, replies = self._connect()
        upstream.sendall(head.text(without="expect"))
        stalls = plan.stall_after is not None and (body == "chunked" or plan.stall_after < int(body))
        limit = plan.stall_after if stalls else _position(plan.cut_request, body)
        method = head.lines[0].partition(b" ")[0]
        try:
            if not self._pass(_pieces(self.rfile, body), upstream, limit, "sent_bytes"):
                return self._give_up(stalls, "requests_cut")
        except BrokenPipeError:  # the server has answered without reading the whole body
            self._pass_response(method, plan, replies)
            return False
        return self._pass_response(method, plan, replies) and not head.ends_connection

    def _fail(self, head: _Head, body: _Body) -> bool:
        self._proxy.count("failed")
        if "expect" in head.fields:  # only the end of the connection says that the body must not follow
            self.connection.sendall(_FAILURE + b"Connection: close\r\n\r\n")
            return False
        for _ in _pieces(self.rfile, body):
            pass
        self.connection.sendall(_FAILURE + b"\r\n")
        return not head.ends_connection

    def _pass_response(self, method: bytes, plan: _Plan, replies: io.BufferedIOBase) -> bool:
        """Pass back a response; return whether the connection can serve another request."""
        while (head := _read_head(replies)) is not None and head.status.startswith(b"1"):
            self.connection.sendall(head.text())
        if head is None:
            return False
        body: _Body = 0
        if method != b"HEAD" and head.status not in (b"204", b"304"):
            body = "to the end" if head.body is None else head.body
        text = head.text()
        limit = plan.stall_after
        if limit is None and (position := _position(plan.cut_response, body)) is not None:
            limit = len(text) + position
        pieces = itertools.chain([text], _pieces(replies, body))
        if not self._pass(pieces, self.connection, limit, "received_bytes"):
            return self._give_up(plan.stall_after is not None, "responses_cut")
        return not (head.ends_connection or body == "to the end")

    def _pass(self, pieces: Iterable[bytes], sink: socket.socket, limit: int | None, counter: str) -> bool:
        """Pass on what comes, as fast as the bandwidth allows; return False if the limit is reached."""
        passed = 0
        for piece in pieces:
            kept = piece if limit is None else piece[: limit - passed]
            self._proxy.wait(self._proxy.bandwidth.book(len(kept), time.monotonic()))
            sink.sendall(kept)
            self._proxy.count(counter, len(kept))
            passed += len(kept)
            if passed == limit:
                return False
        return True

    def _give_up(self, stall: bool, counter: str) -> bool:
        """End the connection, or keep it open without another byte."""
        if stall:
            self._proxy.count("stalled")
            self._proxy.wait(math.inf)
        self._proxy.count(counter)
        return False

    def _connect(self) -> tuple[socket.socket, io.BufferedIOBase]:
        """Return the connection to the server; a new one if the server has closed the last."""
        if self._upstream is not None and select.select([self._upstream], [], [], 0)[0]:
            self._disconnect()
        if self._upstream is None or self._replies is None:
            self._upstream = self._proxy.connect()
            self._replies = self._upstream.makefile("rb")
        return self._upstream, self._replies

    def _disconnect(self) -> None:
        if self._replies is not None:
            self._replies.close()
        if self._upstream is not None:
            self._proxy.disconnect(self._upstream)
        self._upstream = self._replies = None


def _read_head(stream: io.BufferedIOBase) -> _Head | None:
    """Read a request or response up to its body; return None at the end of the connection."""
    lines: list[bytes] = []
    while (line := stream.readline()).strip():
        lines.append(line)
    if not line or not lines:
        return None
    pairs = (each.decode("latin-1").partition(":") for each in lines[1:])
    return _Head(lines, {name.strip().lower(): value.strip() for name, _, value in pairs})


def _pieces(stream: io.BufferedIOBase, body: _Body) -> Iterator[bytes]:
    """Yield a body as it comes, with the framing of its chunks.

    Raises:
        ConnectionResetError: it ends early.
    """
    if body == "to the end":
        while piece := stream.read1(PIECE_BYTES):
            yield piece
    elif body == "chunked":
        yield from _chunks(stream)
    else:
        left = int(body)
        while left:
            piece = stream.read1(min(left, PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the body ends early")
            left -= len(piece)
            yield piece


def _chunks(stream: io.BufferedIOBase) -> Iterator[bytes]:
    while True:
        line = stream.readline()
        if not line:
            raise ConnectionResetError("the body ends early")
        yield line
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            break
        yield from _pieces(stream, size + 2)
    while line := stream.readline():  # trailing fields and the empty line
        yield line
        if not line.strip():
            return


def _position(share: float | None, body: _Body) -> int | None:
    """Return after how many bytes to cut a body; None: do not cut it."""
    if share is None or body == 0:
        return None
    return int(share * (body if isinstance(body, int) else PIECE_BYTES))
