"""Notices of Google Compute Engine: a Spot VM that is preempted, maintenance of the host; TPU VMs included.

Notices of Amazon EC2: a spot instance that is interrupted, told by its metadata service (IMDSv2).

Asks a metadata server for a notice every so many seconds, on a thread of its own.

Requests to the metadata server of a machine: limited in time and size, past all proxies, redirected nowhere.
"""

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
import urllib.error
import urllib.parse
import urllib.request
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
TELL_AGAIN_S = 600.0
JOIN_S = 1.0  # a request that is hung up on ends at once; only the look-up of a name does not
_log = logging.getLogger("jaxckpt_train")
AWS_URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600  # the longest that there is
_TOKEN_PATH = "/latest/api/token"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN, _TOKEN_TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_ACTION, _PLAIN = re.compile("[a-z-]{1,32}"), re.compile(rb"[\x21-\x7e]{1,1024}")
_AWS_HINT = (
    "does this run on Amazon EC2? Else leave this source out of `notices`; in a container the instance needs "
    "HttpPutResponseHopLimit=2"
)
GCE_URL = "http://metadata.google.internal"
_FOLDER = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}
_NO_EVENT, _MIGRATION = "NONE", "MIGRATE_ON_HOST_MAINTENANCE"
_EVENT = re.compile("[A-Z]{1,20}(_[A-Z]{1,20}){1,9}")  # not what is left of NONE when a connection breaks
_GCE_HINT = "does this run on Google Compute Engine? Else leave this source out of `notices`"
OnMaintenance = Literal["terminate", "any", "ignore"]


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


Look = Callable[[MetadataServer], Notice | None]


class Poller:
    """Looks until it has found a notice or is stopped. Who drops it without a stop leaves no thread, either.

    A server that cannot be used is told of by a warning, and so is its next answer; both not again for ten minutes.

    Args:
        name: of the source, for messages.
        url: of the server.
        poll_s: seconds between two looks.
        timeout_s: seconds for one request.
        new_look: makes what asks the server once; a new one for each start. It must not hold the source.
        hint: what to say where the server cannot be used.

    Raises:
        SettingsError: an argument is wrong.
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
        """Begin to look."""
        self.stop()
        self._run = run = _Run(self._name, self._server(), self._poll_s, self._new_look(), self._hint)
        weakref.finalize(self, run.end).atexit = False
        run.begin()

    def stop(self) -> None:
        """End that."""
        if self._run is not None:
            self._run.end()
            self._run.join()

    def notice(self) -> Notice | None:
        """What was found since the last start."""
        return None if self._run is None else self._run.found


class PolledSource:
    """A source of notices that a poller looks for.

    Args:
        poller: of its metadata server.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller

    def start(self) -> None:
        """Begin to ask."""
        self._poller.start()

    def stop(self) -> None:
        """End that."""
        self._poller.stop()

    def notice(self) -> Notice | None:
        """What was found."""
        return self._poller.notice()


class _Run:
    """From one start to its stop."""

    def __init__(self, name: str, server: MetadataServer, poll_s: float, look: Look, hint: str) -> None:
        self._name, self._server, self._poll_s, self._look, self._hint = name, server, poll_s, look, hint
        self.found: Notice | None = None
        self._stop, self._process = Latch(), os.getpid()
        self._thread: threading.Thread | None = None
        self._is_told, self._silent_until = False, 0.0

    def begin(self) -> None:
        thread = threading.Thread(target=self._work, name="jaxckpt-notice", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: preemption notices are not seen: the system gave no thread: %s", self._name, error)
        else:
            self._thread = thread

    def end(self) -> None:
        """Ask it to end; does not wait."""
        self._stop.open()
        if os.getpid() == self._process:  # a fork shares the connection with its parent, who goes on
            self._server.hang_up()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        before: float | None = None  # when the look began that was answered last, or else the first one
        while self.found is None and not self._stop.is_open():
            began = time.monotonic()
            if self._look_once(began if before is None else before) or before is None:
                before = began
            if self.found is None:
                self._stop.wait(self._poll_s)

    def _look_once(self, asked_at: float) -> bool:
        """Whether the server has answered; `asked_at`: when a notice that is there now may have come."""
        try:
            found = self._look(self._server)
        except Exception as error:  # noqa: BLE001  # a thread's edge
            if not self._stop.is_open():
                self._tell(error)
            return False
        if self._is_told:
            self._is_told = False
            _log.warning("%s: %s answers again", self._name, self._server.url)
        if found is not None:
            self.found = dataclasses.replace(found, asked_at=asked_at)
        return True

    def _tell(self, error: Exception) -> None:
        now = time.monotonic()
        if self._is_told or now < self._silent_until:
            return
        self._is_told, self._silent_until = True, now + TELL_AGAIN_S
        trace = None if isinstance(error, NoAnswerError) else error
        text = "%s: preemption notices are not seen, and are asked for again every %g s: %s; %s"
        _log.warning(text, self._name, self._poll_s, error, self._hint, exc_info=trace)


class _Action(msgspec.Struct):
    action: str
    time: object = None


class _Rebalance(msgspec.Struct):
    noticeTime: str  # noqa: N815  # as Amazon names it


_Told = TypeVar("_Told", _Action, _Rebalance)


class AwsNotice(PolledSource):
    """Asks the metadata service of Amazon EC2 whether this spot instance is to be terminated, stopped or hibernated.

    The notice comes two minutes before, and says when (`leave_by`); of a hibernation it comes when that begins.

    Args:
        poll_s: seconds between two looks; Amazon advises 5.
        timeout_s: seconds that one request may take.
        rebalance: leave also when Amazon recommends to rebalance, as an interruption has become likely; it may not
            come, and if it does, this is earlier by minutes.
        url: of the metadata service.

    Raises:
        SettingsError: an argument is wrong.

    Sources: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
    .../rebalance-recommendations.html and .../configuring-instance-metadata-service.html
    """

    def __init__(
        self, poll_s: float = 5.0, timeout_s: float = 2.0, rebalance: bool = False, url: str = AWS_URL
    ) -> None:
        flag("AwsNotice: rebalance", rebalance)

        def new_look() -> Look:
            return _Imds(rebalance).look

        super().__init__(Poller("AwsNotice", url, poll_s, timeout_s, new_look, _AWS_HINT))


class _Imds:
    """A session with the metadata service: its token."""

    def __init__(self, rebalance: bool) -> None:
        self._rebalance = rebalance
        self._token: str | None = None

    def look(self, server: MetadataServer) -> Notice | None:
        answer = self._found(server, _ACTION_PATH)
        if answer is not None:
            example = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
            told = _decoded(answer, _Action, example)
            if not _ACTION.fullmatch(told.action):
                raise answer.unusable(f"JSON such as {example}")
            reason = f"Amazon EC2, which is to {told.action} this spot instance"
            return Notice(reason, leave_by=_monotonic(told.time, answer.headers))
        answer = self._found(server, _REBALANCE_PATH) if self._rebalance else None
        if answer is not None:
            _decoded(answer, _Rebalance, '{"noticeTime": "2020-10-27T08:22:00Z"}')
            return Notice("Amazon EC2, which recommends to rebalance: this spot instance may be interrupted soon")
        return None

    def _found(self, server: MetadataServer, path: str) -> Answer | None:
        """The answer; None: there is nothing at this path."""
        for _ in range(2):
            answer = self._with_token(server, path)
            if answer.status != 401:
                break
            self._token = None  # it has expired
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


def _decoded(answer: Answer, kind: type[_Told], example: str) -> _Told:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise answer.unusable(f"JSON such as {example}") from error


def _monotonic(told: object, headers: Message) -> float | None:
    """A time as one of `time.monotonic()`, by the clock of who told it if the answer has one; None: it is none."""
    try:
        at = datetime.datetime.fromisoformat(str(told))
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
    """Asks the metadata server of Google Compute Engine whether this VM is being preempted, or its host maintained.

    A Spot VM is gone some 30 s after its notice. `maintenance-event` tells of maintenance 60 s before, and of a VM with
    GPUs, which cannot be migrated, an hour before.

    Args:
        poll_s: seconds between two looks; of a notice of 30 s this is lost.
        timeout_s: seconds that one request may take.
        on_maintenance: what maintenance of the host asks the job to leave: "terminate": all but a live migration, which
            only pauses the machine for a moment; "any": that too; "ignore": none.
        url: of the metadata server.

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
        super().__init__(Poller("GceNotice", url, poll_s, timeout_s, lambda: look, _GCE_HINT))


def _look(on_maintenance: OnMaintenance, server: MetadataServer) -> Notice | None:
    """Ask for both, since either may be hidden, as by the metadata server of GKE."""
    problem: NoAnswerError | None = None
    for look in (_preempted, functools.partial(_maintained, on_maintenance)):
        try:
            found = look(server)
        except NoAnswerError as error:
            problem = problem or error
        else:
            if found is not None:
                return found
    if problem is not None:
        raise problem
    return None


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
    """Raises NoAnswerError also for what others answer: only the metadata server sends the header back."""
    answer = server.ask(_FOLDER + key, _FLAVOR)
    if answer.headers.get("Metadata-Flavor") != "Google":
        raise answer.unusable("the header Metadata-Flavor: Google, without which this is no metadata server")
    if answer.status != 200:
        raise answer.unusable("status 200")
    return answer
