"""Requests to the metadata server of a machine: limited in time and size, past all proxies, redirected nowhere."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Any

from jaxckpt_train.value_checks import refuse, shown

MOST_BYTES = 16 * 1024
_SHOWN = 60


class NoAnswerError(Exception):
    """A metadata server gave no answer, or none that can be used. Says what was asked, and what came."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a metadata server said.

    Attributes:
        asked: the request, for messages.
        status: of HTTP.
        headers: found by names in any case.
        body: all of it.
    """

    asked: str
    status: int
    headers: Message
    body: bytes

    def text(self) -> str:
        """The body without white space around it; what is no ASCII is shown as that."""
        return self.body.decode("ascii", "backslashreplace").strip()

    def unusable(self, expected: str) -> NoAnswerError:
        """What to raise if it is not what was expected."""
        found = shown(self.text(), _SHOWN)
        return NoAnswerError(f"{self.asked}: expected {expected}, found status {self.status} and {found}")


class MetadataServer:
    """One server, asked by one thread.

    No answer is longer than `MOST_BYTES`. Redirections are answers as others: a metadata server sends none, and who
    follows one may hand a token to somebody else.

    Args:
        subject: the name of the argument, for messages.
        url: of the server, as "http://169.254.169.254".
        timeout_s: seconds that a request may take, from the connection to the last byte.

    Raises:
        SettingsError: the address is none of a server that speaks plain HTTP.
    """

    def __init__(self, subject: str, url: str, timeout_s: float) -> None:
        self.url, self._timeout_s = _checked(subject, url), timeout_s
        self._line = _Line()
        self._opener = urllib.request.OpenerDirector()  # with no handler of proxies, redirections or errors
        self._opener.add_handler(_Handler(self._line))

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Ask for a path, which begins with a slash.

        Raises:
            NoAnswerError: none came in time, it is too long, or no HTTP.
        """
        asked = f"{method} {self.url}{path}"
        self._line.ends_at = time.monotonic() + self._timeout_s
        request = urllib.request.Request(self.url + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                body, missing = response.read(MOST_BYTES + 1), response.length
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(f"{asked}: {_why(error)}") from error
        if len(body) > MOST_BYTES:
            raise NoAnswerError(f"{asked}: the answer is longer than {MOST_BYTES} bytes")
        if missing:
            raise NoAnswerError(f"{asked}: the answer broke off")
        return Answer(asked, response.status, response.headers, body)

    def hang_up(self) -> None:
        """End the request under way, from another thread; those after it fail."""
        self._line.hang_up()


def _why(error: Exception) -> str:
    """What went wrong, for messages. What is no error of the system may have in it all that the server has sent."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    kind, told = type(reason).__name__, str(reason)
    if isinstance(reason, OSError) and not isinstance(reason, http.client.HTTPException):
        return told or kind
    return f"{kind} {shown(told, _SHOWN)}" if told else kind


class _Line:
    """The connection under way, when it must have ended, and how another thread ends it."""

    def __init__(self) -> None:
        self.ends_at, self._is_over = 0.0, False
        self._socket: _TimedSocket | None = None

    def left_s(self) -> float:
        """Seconds left.

        Raises:
            TimeoutError: none.
        """
        left_s = self.ends_at - time.monotonic()
        if self._is_over or left_s <= 0:
            raise TimeoutError("no answer in time")
        return left_s

    def connect(self, host: str, port: int) -> socket.socket:
        """Connect to the first address that takes it."""
        problem: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._socket = found = _TimedSocket(self, family, kind, protocol)
            try:
                found.connect(address)
            except OSError as error:
                problem = error
                found.close()
            else:
                return found
        raise problem

    def hang_up(self) -> None:
        self._is_over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is not connected, or closed
                self._socket.shutdown(socket.SHUT_RDWR)


class _TimedSocket(socket.socket):
    """Gives each call no more time than there is: a timeout of sockets begins anew with every byte that comes."""

    def __init__(self, line: _Line, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._line = line

    def connect(self, address: Any) -> None:
        self.settimeout(self._line.left_s())
        super().connect(address)

    def sendall(self, *arguments: Any) -> None:
        self.settimeout(self._line.left_s())
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(self._line.left_s())
        return super().recv_into(*arguments)


class _Handler(urllib.request.HTTPHandler):
    def __init__(self, line: _Line) -> None:
        super().__init__()

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = line.connect(self.host, self.port)

        self._connection = Connection  # made once: a class for each request would be garbage for the collector

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)


def _checked(subject: str, url: object) -> str:
    """The address without a slash at its end."""
    wanted = 'the address of a metadata server, as "http://169.254.169.254"'
    if not isinstance(url, str):
        refuse(subject, wanted, url)
    try:
        parts = urllib.parse.urlsplit(url)
        is_server = parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # of a port that is none
        refuse(subject, wanted, url)
    if not is_server or not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment:
        refuse(subject, wanted, url)
    return url.rstrip("/")
