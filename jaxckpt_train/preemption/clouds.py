"""Notice sources for clouds: `GceNotice` and `AwsNotice` ask the metadata server of the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import email.utils
import functools
import http.client
import logging
import os
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any, Literal, TypeVar

import msgspec

from jaxckpt_train._validation import flag, one_of, refuse, seconds, shown
from jaxckpt_train.preemption.sources import Notice
from jaxckpt_train.store.threads import Latch

MOST_BYTES = 16 * 1024
_SHOWN = 60
WARN_AGAIN_S = 600.0
JOIN_S = 1.0  # an interrupted request ends at once; only a name lookup cannot be interrupted
_log = logging.getLogger("jaxckpt_train")
AWS_URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600  # the maximum
_TOKEN_PATH = "/latest/api/token"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN, _TOKEN_TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_ACTION, _PLAIN = re.compile("[a-z-]{1,32}"), re.compile(rb"[\x21-\x7e]{1,1024}")
_AWS_HINT = (
    "is this Amazon EC2? If not, remove this source from `notices`; in a container, the instance needs "
    "HttpPutResponseHopLimit=2"
)
GCE_URL = "http://metadata.google.internal"
_FOLDER = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}
_NO_EVENT, _MIGRATION = "NONE", "MIGRATE_ON_HOST_MAINTENANCE"
_EVENT = re.compile("[A-Z]{1,20}(_[A-Z]{1,20}){1,9}")  # does not match the beginning of NONE from a broken connection
_GCE_HINT = "is this Google Compute Engine? If not, remove this source from `notices`"
OnMaintenance = Literal["terminate", "any", "ignore"]


class NoAnswerError(Exception):
    """A metadata server gave no usable answer. The message has the request and the problem."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a metadata server, with its complete body."""

    asked: str  # the request, for messages
    status: int
    headers: Message
    body: bytes

    def text(self) -> str:
        """The body without surrounding whitespace; bytes that are not ASCII are escaped."""
        return self.body.decode("ascii", "backslashreplace").strip()

    def unusable(self, expected: str) -> NoAnswerError:
        """The error to raise if the answer is not what was expected."""
        found = shown(self.text(), _SHOWN)
        return NoAnswerError(f"{self.asked}: expected {expected}, found status {self.status} and {found}")


class MetadataServer:
    """Sends requests to one server, from one thread, without proxies.

    An answer has at most `MOST_BYTES`. Redirections are not followed: a metadata server sends none, and a token must
    not reach another server. `timeout_s` limits a request from the connection to the last byte.
    """

    def __init__(self, subject: str, url: str, timeout_s: float) -> None:
        self.url, self._timeout_s = _checked(subject, url), timeout_s
        self._line = _Line()

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Request a path, which starts with a slash.

        Raises:
            NoAnswerError: no answer came in time, or it is too long or not HTTP.
        """
        asked, parts = f"{method} {self.url}{path}", urllib.parse.urlsplit(self.url + path)
        self._line.ends_at = time.monotonic() + self._timeout_s
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        try:
            with contextlib.closing(self._line.connect(connection.host, connection.port)) as connection.sock:
                connection.request(method, parts.path, headers={**headers, "Connection": "close"})
                with connection.getresponse() as response:
                    body, missing = response.read(MOST_BYTES + 1), response.length
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(f"{asked}: {_why(error)}") from error
        if len(body) > MOST_BYTES:
            raise NoAnswerError(f"{asked}: the answer is longer than {MOST_BYTES} bytes")
        if missing:
            raise NoAnswerError(f"{asked}: the answer is incomplete")
        return Answer(asked, response.status, response.headers, body)

    def hang_up(self) -> None:
        """End the current request from another thread; later requests fail."""
        self._line.hang_up()


def _why(error: Exception) -> str:
    """Describe an error. Only messages of the operating system are shown in full: others may quote the server."""
    kind, message = type(error).__name__, str(error)
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return message or kind
    return f"{kind} {shown(message, _SHOWN)}" if message else kind


class _Line:
    """The current connection and its deadline. Another thread can end it."""

    def __init__(self) -> None:
        self.ends_at, self._is_over = 0.0, False
        self._socket: _TimedSocket | None = None

    def left_s(self) -> float:
        left_s = self.ends_at - time.monotonic()
        if self._is_over or left_s <= 0:
            raise TimeoutError("no answer within the time limit")
        return left_s

    def connect(self, host: str, port: int) -> socket.socket:
        """Connect to the first address that accepts the connection."""
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
            with contextlib.suppress(OSError):  # not connected, or already closed
                self._socket.shutdown(socket.SHUT_RDWR)


class _TimedSocket(socket.socket):
    """Limits each call to the time left. An ordinary socket timeout restarts with every received byte."""

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


def _checked(subject: str, url: object) -> str:
    """Return the address without a trailing slash."""
    wanted = 'the address of a metadata server, such as "http://169.254.169.254"'
    if not isinstance(url, str):
        refuse(subject, wanted, url)
    try:
        parts = urllib.parse.urlsplit(url)
        is_server = parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an invalid port
        refuse(subject, wanted, url)
    if not is_server or not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment:
        refuse(subject, wanted, url)
    return url.rstrip("/")


Look = Callable[[MetadataServer], Notice | None]


class PolledSource:
    """A notice source that asks a server repeatedly until it finds a notice or is stopped.

    A server that cannot be used is logged as a warning, and so is its next answer; not again within ten minutes. The
    thread ends when the source is dropped, so `new_look`, which makes the function that asks, must not refer to it.
    """

    def __init__(
        self, name: str, url: str, poll_s: float, timeout_s: float, new_look: Callable[[], Look], hint: str
    ) -> None:
        self._name, self._url, self._new_look, self._hint = name, url, new_look, hint
        self._poll_s = seconds(f"{name}: poll_s", poll_s)
        self._timeout_s = seconds(f"{name}: timeout_s", timeout_s)
        self._run: _Run | None = None
        self._server()

    def _server(self) -> MetadataServer:
        return MetadataServer(f"{self._name}: url", self._url, self._timeout_s)

    def start(self) -> None:
        """Start polling."""
        self.stop()
        self._run = run = _Run(self._name, self._server(), self._poll_s, self._new_look(), self._hint)
        weakref.finalize(self, run.end).atexit = False
        run.begin()

    def stop(self) -> None:
        """Stop polling."""
        if self._run is not None:
            self._run.end()
            self._run.join()

    def notice(self) -> Notice | None:
        """The notice found since the last start, or None."""
        return None if self._run is None else self._run.found


class _Run:
    """The polling between one start and its stop."""

    def __init__(self, name: str, server: MetadataServer, poll_s: float, look: Look, hint: str) -> None:
        self._name, self._server, self._poll_s, self._look, self._hint = name, server, poll_s, look, hint
        self.found: Notice | None = None
        self._stop, self._process = Latch(), os.getpid()
        self._thread: threading.Thread | None = None
        self._has_warned, self._silent_until = False, 0.0

    def begin(self) -> None:
        thread = threading.Thread(target=self._work, name="jaxckpt-notice", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: preemption notices are not seen: no thread could be started: %s", self._name, error)
        else:
            self._thread = thread

    def end(self) -> None:
        """Ask the thread to end, without waiting."""
        self._stop.open()
        if os.getpid() == self._process:  # a forked child shares the connection with its parent
            self._server.hang_up()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        before: float | None = None  # the start of the last answered request, or else of the first request
        while self.found is None and not self._stop.is_open():
            began = time.monotonic()
            if self._look_once(began if before is None else before) or before is None:
                before = began
            if self.found is None:
                self._stop.wait(self._poll_s)

    def _look_once(self, asked_at: float) -> bool:
        """Ask once; return whether the server answered. `asked_at`: when a notice found now may have come."""
        try:
            found = self._look(self._server)
        except Exception as error:  # noqa: BLE001  # nothing else would report an error of this thread
            if not self._stop.is_open():
                self._warn(error)
            return False
        if self._has_warned:
            self._has_warned = False
            _log.warning("%s: %s answers again", self._name, self._server.url)
        if found is not None:
            self.found = dataclasses.replace(found, asked_at=asked_at)
        return True

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if self._has_warned or now < self._silent_until:
            return
        self._has_warned, self._silent_until = True, now + WARN_AGAIN_S
        trace = None if isinstance(error, NoAnswerError) else error
        text = "%s: preemption notices are not seen; the next attempt is in %g s: %s; %s"
        _log.warning(text, self._name, self._poll_s, error, self._hint, exc_info=trace)


class _Action(msgspec.Struct):
    action: str
    time: object = None


class _Rebalance(msgspec.Struct):
    noticeTime: str  # noqa: N815  # Amazon's name


_Decoded = TypeVar("_Decoded", _Action, _Rebalance)


class AwsNotice(PolledSource):
    """Asks the metadata service of Amazon EC2 whether this spot instance will be terminated, stopped or hibernated.

    The notice comes two minutes before, and has the time (`leave_by`). For a hibernation, it comes when that starts.

    Args:
        poll_s: the seconds between two requests; Amazon recommends 5.
        timeout_s: the seconds that one request may take.
        rebalance: whether to shut down also on a rebalance recommendation, which means that an interruption has become
            likely; it may not come, and if it does, it comes minutes earlier.
        url: the address of the metadata service.

    Raises:
        SettingsError: an argument is wrong.

    Sources: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
    .../rebalance-recommendations.html and .../configuring-instance-metadata-service.html
    """

    def __init__(
        self, poll_s: float = 5.0, timeout_s: float = 2.0, rebalance: bool = False, url: str = AWS_URL
    ) -> None:
        flag("AwsNotice: rebalance", rebalance)
        super().__init__("AwsNotice", url, poll_s, timeout_s, lambda: _Imds(rebalance).look, _AWS_HINT)


class _Imds:
    """A session with the metadata service, with its token (IMDSv2)."""

    def __init__(self, rebalance: bool) -> None:
        self._rebalance = rebalance
        self._token: str | None = None

    def look(self, server: MetadataServer) -> Notice | None:
        answer = self._found(server, _ACTION_PATH)
        if answer is not None:
            example = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
            found = _decoded(answer, _Action, example)
            if not _ACTION.fullmatch(found.action):
                raise answer.unusable(f"JSON such as {example}")
            reason = f"Amazon EC2, which is to {found.action} this spot instance"
            return Notice(reason, leave_by=_monotonic(found.time, answer.headers))
        answer = self._found(server, _REBALANCE_PATH) if self._rebalance else None
        if answer is not None:
            _decoded(answer, _Rebalance, '{"noticeTime": "2020-10-27T08:22:00Z"}')
            return Notice("Amazon EC2, which recommends to rebalance: this spot instance may be interrupted soon")
        return None

    def _found(self, server: MetadataServer, path: str) -> Answer | None:
        """The answer; None: the path does not exist."""
        for _ in range(2):
            answer = self._with_token(server, path)
            if answer.status != 401:
                break
            self._token = None  # expired
        if answer.status not in (200, 404):
            raise answer.unusable("status 200 or 404")
        return None if answer.status == 404 else answer

    def _with_token(self, server: MetadataServer, path: str) -> Answer:
        if self._token is None:
            answer = server.ask(_TOKEN_PATH, {_TOKEN_TTL: str(TOKEN_TTL_S)}, method="PUT")
            if answer.status != 200 or not _PLAIN.fullmatch(answer.body.strip()):
                raise answer.unusable("status 200 and a token")
            self._token = answer.text()
        return server.ask(path, {_TOKEN: self._token})


def _decoded(answer: Answer, kind: type[_Decoded], example: str) -> _Decoded:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise answer.unusable(f"JSON such as {example}") from error


def _monotonic(stated: object, headers: Message) -> float | None:
    """Convert a time to `time.monotonic()`, by the server's clock if the answer has its date; None: not a time."""
    try:
        at = datetime.datetime.fromisoformat(str(stated))
        left_s = _utc(at).timestamp() - _now(headers)
    except (ValueError, OverflowError):
        return None
    return time.monotonic() + left_s


def _now(headers: Message) -> float:
    try:
        return _utc(email.utils.parsedate_to_datetime(headers["Date"])).timestamp()
    except (TypeError, ValueError, OverflowError):
        return time.time()


def _utc(at: datetime.datetime) -> datetime.datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)


class GceNotice(PolledSource):
    """Asks the metadata server of Google Compute Engine whether this VM is being preempted or its host maintained.

    A Spot VM ends about 30 s after its notice. `maintenance-event` announces maintenance 60 s before; for a VM with
    GPUs, which cannot be migrated, an hour before. TPU VMs are included.

    Args:
        poll_s: the seconds between two requests; they reduce the 30 s of a notice.
        timeout_s: the seconds that one request may take.
        on_maintenance: which maintenance of the host shuts the job down: "terminate": any except a live migration,
            which only pauses the machine for a moment; "any": all; "ignore": none.
        url: the address of the metadata server.

    Raises:
        SettingsError: an argument is wrong.

    Sources: cloud.google.com/compute/docs/instances/create-use-spot and .../docs/metadata/getting-live-migration-notice
    """

    def __init__(
        self,
        poll_s: float = 1.0,
        timeout_s: float = 2.0,
        on_maintenance: OnMaintenance = "terminate",
        url: str = GCE_URL,
    ) -> None:
        one_of("terminate", "any", "ignore")("GceNotice: on_maintenance", on_maintenance)
        look = functools.partial(_look, on_maintenance)
        super().__init__("GceNotice", url, poll_s, timeout_s, lambda: look, _GCE_HINT)


def _look(on_maintenance: OnMaintenance, server: MetadataServer) -> Notice | None:
    """Ask for both events, since the server may hide either, as that of GKE does."""
    try:
        found = _preempted(server)
    except NoAnswerError:
        if (found := _maintained(on_maintenance, server)) is None:
            raise
        return found
    return found or _maintained(on_maintenance, server)


def _preempted(server: MetadataServer) -> Notice | None:
    answer = _asked(server, "preempted")
    if answer.text() not in ("TRUE", "FALSE"):
        raise answer.unusable("TRUE or FALSE")
    return Notice("Google Compute Engine, which preempts this machine") if answer.text() == "TRUE" else None


def _maintained(on_maintenance: OnMaintenance, server: MetadataServer) -> Notice | None:
    if on_maintenance == "ignore":
        return None
    answer = _asked(server, "maintenance-event")
    event = answer.text()
    if event == _NO_EVENT or (event == _MIGRATION and on_maintenance != "any"):
        return None
    if not _EVENT.fullmatch(event):
        raise answer.unusable("NONE or the name of an event, such as TERMINATE_ON_HOST_MAINTENANCE")
    return Notice(f"Google Compute Engine, which announces {event}")


def _asked(server: MetadataServer, key: str) -> Answer:
    """Ask for a key. Raises NoAnswerError also if another server answers: only the metadata server has the header."""
    answer = server.ask(_FOLDER + key, _FLAVOR)
    if answer.headers.get("Metadata-Flavor") != "Google":
        raise answer.unusable("the header Metadata-Flavor: Google, which only the metadata server sends")
    if answer.status != 200:
        raise answer.unusable("status 200")
    return answer
