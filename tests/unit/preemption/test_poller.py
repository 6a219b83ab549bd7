"""Polled sources with servers that hang, break off, send garbage, and recover: each problem is logged once."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.metadata_servers import (
    MISBEHAVIOURS,
    Gce,
    Handler,
    Imds,
    Respond,
    Server,
    close,
    hang,
    notice_threads,
    send,
    started,
    until,
)

QUICK: dict[str, Any] = {"poll_s": 0.02, "timeout_s": 0.1}


@dataclasses.dataclass
class Kind:
    """A source, a server for it, and a function that makes the server announce a preemption."""

    source: Callable[..., Any]
    speaks: Callable[[], Any]
    ask: Callable[[Any], None]
    requests_per_poll: int


GCE = Kind(jct.GceNotice, Gce, lambda gce: gce.values.update(preempted="TRUE"), 2)
AWS = Kind(jct.AwsNotice, Imds, lambda imds: imds.interrupt("terminate", "2017-09-18T08:22:00Z"), 1)
both = pytest.mark.parametrize("kind", [GCE, AWS], ids=["gce", "aws"])


def but_for_tokens(right: Respond, wrong: Respond) -> Respond:
    return lambda handler, server: (right if handler.command == "PUT" else wrong)(handler, server)


@both
@pytest.mark.parametrize("misbehave", MISBEHAVIOURS, ids=lambda one: one.__name__)
def test_failure_and_recovery_are_logged_once(kind: Kind, misbehave: Respond, caplog: pytest.LogCaptureFixture) -> None:
    cloud = kind.speaks()
    with Server(but_for_tokens(cloud, misbehave)) as server, started(kind.source(url=server.url, **QUICK)) as source:
        server.wait_for(2 * kind.requests_per_poll + 2)  # the token, two polls, and the start of a third
        assert source.notice() is None
        assert caplog.text.count("preemption notices are not seen") == len(caplog.records) == 1
        assert server.url in caplog.text
        assert "Traceback" not in caplog.text
        assert len(caplog.text) < 1000
        server.respond = cloud
        until(lambda: len(caplog.records) == 2)
        assert f"{server.url} answers again" in caplog.text
        assert source.notice() is None
        kind.ask(cloud)
        until(source.notice)
        assert len(caplog.records) == 2


@both
def test_flapping_server_is_logged_once(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    cloud, count = kind.speaks(), [0]

    def respond(handler: Handler, server: Server) -> None:
        count[0] += 1
        if count[0] % 4 < 2:
            send(handler, 503, b"")
        else:
            cloud(handler, server)

    with Server(respond) as server, started(kind.source(url=server.url, **QUICK)):
        server.wait_for(30)
        assert [record.getMessage().split(": ")[1][:20] for record in caplog.records] in (
            ["preemption notices a"],
            ["preemption notices a", f"{server.url} answers again"[:20]],
        )


@both
def test_refused_connection_is_logged(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    with Server(hang) as server:
        url = server.url
    with started(kind.source(url=url, **QUICK)) as source:
        until(lambda: caplog.records)
        assert "Connection refused" in caplog.text
        assert "remove this source from `notices`" in caplog.text
        assert source.notice() is None


@both
def test_proxies_and_redirections_are_not_followed(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = kind.speaks()
    kind.ask(cloud)
    with Server(cloud) as elsewhere, Server(cloud) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, elsewhere.url)
        monkeypatch.delenv("no_proxy", raising=False)
        with started(kind.source(url=server.url, **QUICK)) as source:
            until(source.notice)

        def redirect(handler: Handler, server: Server) -> None:
            send(handler, 307, b"", Location=elsewhere.url + handler.path, Metadata_Flavor="Google")

        server.respond = redirect
        with started(kind.source(url=server.url, **QUICK)) as source:
            server.wait_for(6)
            assert source.notice() is None
        assert "found status 307" in caplog.text
        assert elsewhere.requests.empty()


@both
def test_a_notice_stays_and_ends_the_polling(kind: Kind) -> None:
    cloud = kind.speaks()
    with Server(cloud) as server, started(kind.source(url=server.url, **QUICK)) as source:
        server.wait_for(2 * kind.requests_per_poll + 2)
        now = time.monotonic()
        kind.ask(cloud)
        until(source.notice)
        assert source.notice().asked_at <= now
        until(lambda: not notice_threads())
        server.respond = kind.speaks()
        assert source.notice() is source.notice() is not None


@both
def test_stop_does_not_wait_for_hanging_server(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    with Server(hang) as server:
        source = kind.source(url=server.url, poll_s=0.02, timeout_s=3600.0)
        source.stop()
        source.start()
        server.wait_for(1)
        before = time.monotonic()
        source.stop()
        assert time.monotonic() - before < 10
        source.stop()
        assert source.notice() is None
    until(lambda: not notice_threads())
    assert caplog.records == []


@both
def test_a_source_can_be_started_again(kind: Kind) -> None:
    cloud = kind.speaks()
    with Server(cloud) as server:
        source = kind.source(url=server.url, **QUICK)
        for _ in range(2):
            with started(source):
                server.wait_for(2)
            until(lambda: not notice_threads())
        source.start()
        server.wait_for(2)
        kind.ask(cloud)
        with started(source):
            until(source.notice)


@both
def test_each_start_warns_of_a_broken_server(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    with Server(close) as server:
        source = kind.source(url=server.url, **QUICK)
        for count in (1, 2):
            with started(source):
                until(lambda count=count: len(caplog.records) == count)
            until(lambda: not notice_threads())


@both
def test_dropped_source_leaves_no_thread(kind: Kind) -> None:
    with Server(kind.speaks()) as server:
        source = kind.source(url=server.url, poll_s=3600.0)
        source.start()
        server.wait_for(1)
        assert len(notice_threads()) == 1
        del source
        gc.collect()
        until(lambda: not notice_threads())


@both
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "https://169.254.169.254"}, "Notice: url: expected the address"),
        ({"url": "169.254.169.254"}, "Notice: url"),
        ({"url": "http://"}, "Notice: url"),
        ({"url": "http://a b"}, "Notice: url"),
        ({"url": "http://a:b"}, "Notice: url"),
        ({"url": "file:///etc"}, "Notice: url"),
        ({"url": None}, "Notice: url"),
        ({"poll_s": 0}, "Notice: poll_s: .* above 0"),
        ({"poll_s": "1"}, "Notice: poll_s"),
        ({"timeout_s": -1}, "Notice: timeout_s"),
    ],
)
def test_wrong_arguments_are_refused(kind: Kind, options: Any, said: str) -> None:
    with pytest.raises(jct.SettingsError, match=said):
        kind.source(**options)


@both
def test_notice_is_dated_to_first_failed_poll(kind: Kind) -> None:
    cloud = kind.speaks()
    with Server(cloud) as server, started(kind.source(url=server.url, **QUICK)) as source:
        server.wait_for(2 * kind.requests_per_poll + 2)
        server.respond = but_for_tokens(cloud, MISBEHAVIOURS[0])
        server.wait_for(2 * kind.requests_per_poll + 2)  # perhaps the last answered poll, and one without an answer
        failing = time.monotonic()
        server.wait_for(3)
        kind.ask(cloud)
        server.respond = cloud
        until(source.notice)
        assert source.notice().asked_at < failing
