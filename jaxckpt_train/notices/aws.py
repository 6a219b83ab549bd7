"""Notices of Amazon EC2: a spot instance that is interrupted, told by its metadata service (IMDSv2)."""

from __future__ import annotations

import datetime
import email.utils
import re
import time
from email.message import Message
from typing import TypeVar

import msgspec

from jaxckpt_train.notices.metadata_server import Answer, MetadataServer
from jaxckpt_train.notices.poller import Look, PolledSource, Poller
from jaxckpt_train.notices.source import Notice
from jaxckpt_train.value_checks import flag

URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600  # the longest that there is
_TOKEN_PATH = "/latest/api/token"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN, _TOKEN_TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_ACTION, _PLAIN = re.compile("[a-z-]{1,32}"), re.compile(rb"[\x21-\x7e]{1,1024}")
_HINT = (
    "does this run on Amazon EC2? Else leave this source out of `notices`; in a container the instance needs "
    "HttpPutResponseHopLimit=2"
)


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

    def __init__(self, poll_s: float = 5.0, timeout_s: float = 2.0, rebalance: bool = False, url: str = URL) -> None:
        flag("AwsNotice: rebalance", rebalance)

        def new_look() -> Look:
            return _Imds(rebalance).look

        super().__init__(Poller("AwsNotice", url, poll_s, timeout_s, new_look, _HINT))


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
