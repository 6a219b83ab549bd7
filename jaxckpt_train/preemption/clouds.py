"""Notice sources for clouds: `GceNotice` and `AwsNotice` ask the metadata server of the machine."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime
import email.utils
import http.client
import logging
import re
import threading
import time
import urllib.parse
import weakref
from collections.abc import Mapping
from email.message import Message
from typing import Annotated, Literal

import msgspec

from jaxckpt_train._validation import flag, one_of, refuse, seconds, shown
from jaxckpt_train.preemption.sources import Notice
from jaxckpt_train.store.threads import Latch

MOST_BYTES = 16 * 1024
_SHOWN = 60
WARN_AGAIN_S = 600.0
_log = logging.getLogger("jaxckpt_train")
_URL = re.compile(r"http://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?(/[\w./-]*)?", re.ASCII)
AWS_URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600  # the maximum
_TOKEN_PATH = "/latest/api/token"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN, _TOKEN_TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_PLAIN = re.compile(r"[\x21-\x7e]{1,1024}")
GCE_URL = "http://metadata.google.internal"
_FOLDER = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}
_NO_EVENT, _MIGRATION = "NONE", "MIGRATE_ON_HOST_MAINTENANCE"
_EVENT = re.compile("[A-Z]{1,20}(_[A-Z]{1,20}){1,9}")
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
    """Sends requests to one server, without proxies.

    An answer has at most `MOST_BYTES`. Redirections are not followed: a metadata server sends none, and a token must
    not reach another server. `timeout_s` limits the connection and each read of the answer.
    """

    def __init__(self, subject: str, url: object, timeout_s: float) -> None:
        if not isinstance(url, str) or not _URL.fullmatch(url):
            refuse(subject, 'the address of a metadata server, such as "http://169.254.169.254"', url)
        self.url, self._timeout_s = url.rstrip("/"), timeout_s

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Answer:
        """Request a path, which starts with a slash.

        Raises:
            NoAnswerError: no answer came in time, or it is too long or not HTTP.
        """
        asked, parts = f"{method} {self.url}{path}", urllib.parse.urlsplit(self.url + path)
        try:
            connection = http.client.HTTPConnection(parts.netloc, timeout=self._timeout_s)
            with contextlib.closing(connection):
                connection.request(method, parts.path, headers={**headers, "Connection": "close"})
                with connection.getresponse() as response:
                    body, missing = response.read(MOST_BYTES + 1), response.length
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(f"{asked}: {type(error).__name__} {shown(str(error), _SHOWN)}") from error
        if len(body) > MOST_BYTES:
            raise NoAnswerError(f"{asked}: the answer is longer than {MOST_BYTES} bytes")
        if missing:
            raise NoAnswerError(f"{asked}: the answer is incomplete")
        return Answer(asked, response.status, response.headers, body)


class PolledSource(abc.ABC):
    """A notice source that asks a server on a thread, until there is a notice or the source is stopped or dropped.

    A server that cannot be used is logged as a warning, and so is its next answer; not again within ten minutes.
    """

    def __init__(self, url: str, poll_s: float, timeout_s: float, hint: str) -> None:
        self._name, self._hint = type(self).__name__, hint
        self._poll_s = seconds(f"{self._name}: poll_s", poll_s)
        self._server = MetadataServer(f"{self._name}: url", url, seconds(f"{self._name}: timeout_s", timeout_s))
        self._stop = Latch()
        self._found: Notice | None = None
        self._answered_at: float | None = None  # the start of the last answered request, or else of the first request
        self._has_warned, self._silent_until = False, 0.0

    @abc.abstractmethod
    def _look(self) -> Notice | None:
        """Ask the server; NoAnswerError: it gave no usable answer."""

    def start(self) -> None:
        """Start polling."""
        self.stop()
        self._stop, self._found, self._answered_at = Latch(), None, None
        self._has_warned, self._silent_until = False, 0.0
        arguments = weakref.ref(self), self._stop, self._poll_s
        weakref.finalize(self, self._stop.open).atexit = False
        try:
            threading.Thread(target=_poll, args=arguments, name="jaxckpt-notice", daemon=True).start()
        except RuntimeError as error:
            _log.warning("%s: preemption notices are not seen: no thread could be started: %s", self._name, error)

    def stop(self) -> None:
        """Stop polling. A request that waits for the server ends by its own time limit."""
        self._stop.open()

    def notice(self) -> Notice | None:
        """The notice found since the last start, or None."""
        return self._found

    def look_once(self, stop: Latch) -> bool:
        """Ask once; return whether there is a notice now. Failures are not logged after `stop` was opened."""
        began = time.monotonic()
        asked_at = self._answered_at = began if self._answered_at is None else self._answered_at
        try:
            found = self._look()
        except Exception as error:  # noqa: BLE001  # nothing else would report an error of this thread
            if not stop.is_open():
                self._warn(error)
            return False
        if self._has_warned:
            self._has_warned = False
            _log.warning("%s: %s answers again", self._name, self._server.url)
        self._answered_at = began
        if found is not None and not stop.is_open():
            self._found = dataclasses.replace(found, asked_at=asked_at)
        return found is not None

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if self._has_warned or now < self._silent_until:
            return
        self._has_warned, self._silent_until = True, now + WARN_AGAIN_S
        trace = None if isinstance(error, NoAnswerError) else error
        text = "%s: preemption notices are not seen; the next attempt is in %g s: %s; %s"
        _log.warning(text, self._name, self._poll_s, error, self._hint, exc_info=trace)


def _poll(dropped: weakref.ref[PolledSource], stop: Latch, poll_s: float) -> None:
    while not stop.is_open() and (source := dropped()) is not None and not source.look_once(stop):
        del source  # this thread must not keep it
        stop.wait(poll_s)


class _Action(msgspec.Struct):
    action: Annotated[str, msgspec.Meta(pattern="^[a-z-]{1,32}$")]
    time: object = None


class AwsNotice(PolledSource):
    """Asks the metadata service of Amazon EC2 whether this spot instance will be terminated, stopped or hibernated.

    The notice comes two minutes before, and has the time (`leave_by`). For a hibernation, it comes when that starts.

    Args:
        poll_s: the seconds between two requests; Amazon recommends 5.
        timeout_s: the seconds to wait for the server.
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
        hint = (
            "is this Amazon EC2? If not, remove this source from `notices`; in a container, the instance needs "
            "HttpPutResponseHopLimit=2"
        )
        super().__init__(url, poll_s, timeout_s, hint)
        self._rebalance = flag("AwsNotice: rebalance", rebalance)
        self._token: str | None = None  # of IMDSv2

    def _look(self) -> Notice | None:
        answer = self._found_at(_ACTION_PATH)
        if answer is not None:
            try:
                found = msgspec.json.decode(answer.body, type=_Action)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise answer.unusable('JSON such as {"action": "stop", "time": "2017-09-18T08:22:00Z"}') from error
            reason = f"Amazon EC2, which is to {found.action} this spot instance"
            return Notice(reason, leave_by=_monotonic(found.time, answer.headers))
        if self._rebalance and self._found_at(_REBALANCE_PATH) is not None:
            return Notice("Amazon EC2, which recommends to rebalance: this spot instance may be interrupted soon")
        return None

    def _found_at(self, path: str) -> Answer | None:
        """The answer; None: the path does not exist."""
        for _ in range(2):
            answer = self._ask_with_token(path)
            if answer.status != 401:
                break
            self._token = None  # expired
        if answer.status not in (200, 404):
            raise answer.unusable("status 200 or 404")
        return None if answer.status == 404 else answer

    def _ask_with_token(self, path: str) -> Answer:
        if self._token is None:
            answer = self._server.ask(_TOKEN_PATH, {_TOKEN_TTL: str(TOKEN_TTL_S)}, method="PUT")
            if answer.status != 200 or not answer.body.isascii() or not _PLAIN.fullmatch(answer.text()):
                raise answer.unusable("status 200 and a token")
            self._token = answer.text()
        return self._server.ask(path, {_TOKEN: self._token})


def _monotonic(stated: object, headers: Message) -> float | None:
    """Convert a time to `time.monotonic()`, by the server's clock if the answer has its date; None: not a time."""
    now_s = time.time()
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        now_s = _timestamp(email.utils.parsedate_to_datetime(headers["Date"]))
    try:
        return time.monotonic() + _timestamp(datetime.datetime.fromisoformat(str(stated))) - now_s
    except (ValueError, OverflowError):
        return None


def _timestamp(at: datetime.datetime) -> float:
    return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()


class GceNotice(PolledSource):
    """Asks the metadata server of Google Compute Engine whether this VM is being preempted or its host maintained.

    A Spot VM ends about 30 s after its notice. `maintenance-event` announces maintenance 60 s before; for a VM with
    GPUs, which cannot be migrated, an hour before. TPU VMs are included.

    Args:
        poll_s: the seconds between two requests; they reduce the 30 s of a notice.
        timeout_s: the seconds to wait for the server.
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
        hint = "is this Google Compute Engine? If not, remove this source from `notices`"
        super().__init__(url, poll_s, timeout_s, hint)
        self._on_maintenance = one_of("terminate", "any", "ignore")("GceNotice: on_maintenance", on_maintenance)

    def _look(self) -> Notice | None:
        """Ask for both events, since the server may hide either, as that of GKE does."""
        try:
            found = self._preempted()
        except NoAnswerError:
            if (found := self._maintained()) is None:
                raise
        return found or self._maintained()

    def _preempted(self) -> Notice | None:
        answer = self._ask_for("preempted")
        if answer.text() not in ("TRUE", "FALSE"):
            raise answer.unusable("TRUE or FALSE")
        return Notice("Google Compute Engine, which preempts this machine") if answer.text() == "TRUE" else None

    def _maintained(self) -> Notice | None:
        if self._on_maintenance == "ignore":
            return None
        answer = self._ask_for("maintenance-event")
        event = answer.text()
        if event == _NO_EVENT or (event == _MIGRATION and self._on_maintenance != "any"):
            return None
        if not _EVENT.fullmatch(event):
            raise answer.unusable("NONE or the name of an event, such as TERMINATE_ON_HOST_MAINTENANCE")
        return Notice(f"Google Compute Engine, which announces {event}")

    def _ask_for(self, key: str) -> Answer:
        """Ask for a key. Raises NoAnswerError also if another server answers, which does not have the header."""
        answer = self._server.ask(_FOLDER + key, _FLAVOR)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise answer.unusable("the header Metadata-Flavor: Google, which only the metadata server sends")
        if answer.status != 200:
            raise answer.unusable("status 200")
        return answer
