"""Notices of Amazon EC2, from a local server that imitates its metadata service, tokens included."""

from __future__ import annotations

import datetime
import email.utils
import json
import time
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.metadata_servers import Handler, Imds, Server, send, started, until

TOKEN, ACTION, REBALANCE = "PUT /latest/api/token", f"GET {Imds.ACTION}", f"GET {Imds.REBALANCE}"
UTC = datetime.UTC


def source(server: Server, **options: Any) -> jct.AwsNotice:
    return jct.AwsNotice(**{"url": server.url, "poll_s": 0.01, **options})


def in_s(seconds: float, now: datetime.datetime | None = None) -> str:
    at = (now or datetime.datetime.now(UTC)) + datetime.timedelta(seconds=seconds)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_is_noticed_with_its_time(action: str, caplog: pytest.LogCaptureFixture) -> None:
    imds = Imds()
    with Server(imds) as server, started(source(server)) as notice:
        assert server.wait_for(4) == [TOKEN, ACTION, ACTION, ACTION]
        assert notice.notice() is None
        imds.interrupt(action, in_s(120))
        until(notice.notice)
        assert notice.notice().reason == f"Amazon EC2, which is to {action} this spot instance"
        assert 110 < notice.notice().leave_by - time.monotonic() < 121
    assert caplog.records == []


def test_deadline_uses_the_clock_of_server() -> None:
    imds = Imds()
    there = datetime.datetime(2017, 9, 18, 8, 20, 0, tzinfo=UTC)
    imds.date = email.utils.format_datetime(there, usegmt=True)
    imds.interrupt("terminate", in_s(120, there))
    before = time.monotonic()
    with Server(imds) as server, started(source(server)) as notice:
        until(notice.notice)
        assert before + 120 <= notice.notice().leave_by <= time.monotonic() + 120


@pytest.mark.parametrize("date", ["yesterday", "", "Mon, 99 Sep 2017 08:20:00 GMT"])
def test_deadline_without_date_uses_local_clock(date: str) -> None:
    imds = Imds()
    imds.date = date
    imds.interrupt("terminate", in_s(120))
    with Server(imds) as server, started(source(server)) as notice:
        until(notice.notice)
        assert 110 < notice.notice().leave_by - time.monotonic() < 121


@pytest.mark.parametrize("time_", ["soon", "", "2017-09-18T08:22:99Z", None, 5, ["2017"]])
def test_interruption_without_valid_time_is_noticed(time_: Any, caplog: pytest.LogCaptureFixture) -> None:
    imds = Imds()
    imds.answers[Imds.ACTION] = json.dumps({"action": "terminate", "time": time_, "new": {}}).encode()
    with Server(imds) as server, started(source(server)) as notice:
        until(notice.notice)
        assert notice.notice().leave_by is None
    assert caplog.records == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"action": 3}',
        b'{"action": "Traceback\\n"}',
        b"\xff",
        b"[" * 10_000,
        b'{"a":' * 3000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_other_notices_are_logged_only(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    imds = Imds()
    imds.answers[Imds.ACTION] = body
    with Server(imds) as server, started(source(server)) as notice:
        server.wait_for(4)
        assert notice.notice() is None
    assert len(caplog.records) == 1
    assert "expected JSON such as" in caplog.text
    assert "Traceback (" not in caplog.text


def test_expired_token_is_replaced_silently(caplog: pytest.LogCaptureFixture) -> None:
    imds = Imds()
    with Server(imds) as server, started(source(server)) as notice:
        server.wait_for(3)
        imds.tokens.clear()
        until(lambda: imds.given == 2)
        imds.interrupt("terminate", in_s(120))
        until(notice.notice)
        assert imds.given == 2
    assert caplog.records == []


def test_refused_token_is_renewed_once_per_poll(caplog: pytest.LogCaptureFixture) -> None:
    def respond(handler: Handler, server: Server) -> None:
        send(handler, *((200, b"token") if handler.command == "PUT" else (401, b"")))

    with Server(respond) as server, started(source(server)) as notice:
        assert server.wait_for(6) == [TOKEN, ACTION, TOKEN, ACTION, TOKEN, ACTION]
        assert notice.notice() is None
    assert len(caplog.records) == 1
    assert "found status 401" in caplog.text


@pytest.mark.parametrize(
    ("status", "token"), [(403, b""), (200, b""), (200, b"a\r\nX-Evil: b"), (200, b"\xff"), (200, b"x" * 2000)]
)
def test_invalid_token_is_not_sent(status: int, token: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Server(lambda handler, _: send(handler, status, token)) as server, started(source(server)) as notice:
        assert server.wait_for(3) == [TOKEN] * 3
        assert notice.notice() is None
    assert len(caplog.records) == 1
    assert "HttpPutResponseHopLimit" in caplog.text


def test_rebalance_recommendation_counts_if_enabled() -> None:
    imds = Imds()
    imds.answers[Imds.REBALANCE] = b'{"noticeTime": "2020-10-27T08:22:00Z"}'
    with Server(imds) as server:
        with started(source(server)) as notice:
            assert server.wait_for(4) == [TOKEN, ACTION, ACTION, ACTION]
            assert notice.notice() is None
        with started(source(server, rebalance=True)) as notice:
            until(notice.notice)
            assert "recommends to rebalance" in notice.notice().reason
            assert notice.notice().leave_by is None
        imds.interrupt("terminate", in_s(120))  # as both may come at once
        with started(source(server, rebalance=True)) as notice:
            until(notice.notice)
            assert "is to terminate" in notice.notice().reason


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match=r"AwsNotice: rebalance: .*'no'"):
        jct.AwsNotice(rebalance="no")  # type: ignore[arg-type]
