"""Notices of Google Compute Engine, from a server on loopback that speaks as its metadata server does."""

from __future__ import annotations

from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.metadata_servers import Gce, Handler, Server, send, started, until

PATHS = ["GET /computeMetadata/v1/instance/preempted", "GET /computeMetadata/v1/instance/maintenance-event"]
TERMINATE, MIGRATE = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"


def source(server: Server, **options: Any) -> jct.GceNotice:
    return jct.GceNotice(**{"url": server.url, "poll_s": 0.01, **options})


def test_a_spot_vm_that_is_preempted_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    gce = Gce()
    with Server(gce) as server, started(source(server)) as notice:
        assert server.wait_for(4) == PATHS * 2
        assert notice.notice() is None
        gce.values["preempted"] = "TRUE"
        until(notice.notice)
        assert notice.notice().reason == "Google Compute Engine, which preempts this machine"
        assert notice.notice().leave_by is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("event", "on_maintenance", "asks"),
    [
        (TERMINATE, "terminate", True),
        (TERMINATE, "any", True),
        (TERMINATE, "ignore", False),
        (MIGRATE, "terminate", False),
        (MIGRATE, "any", True),
        (MIGRATE, "ignore", False),
        ("SOMETHING_NEW", "terminate", True),
    ],
)
def test_what_maintenance_of_the_host_asks_for(
    event: str, on_maintenance: str, asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gce = Gce()
    gce.values["maintenance-event"] = event
    with Server(gce) as server, started(source(server, on_maintenance=on_maintenance)) as notice:
        if asks:
            until(notice.notice)
            assert notice.notice().reason == f"Google Compute Engine, which announces {event}"
        else:
            assert server.wait_for(5)[:2] == (PATHS if on_maintenance != "ignore" else PATHS[:1] * 2)
            assert notice.notice() is None
    assert caplog.records == []


def test_who_does_not_send_the_header_back_is_no_metadata_server(caplog: pytest.LogCaptureFixture) -> None:
    def respond(handler: Handler, server: Server) -> None:
        send(handler, 200, b"TRUE" if handler.path.endswith("preempted") else TERMINATE.encode())

    with Server(respond) as server, started(source(server)) as notice:
        server.wait_for(6)
        assert notice.notice() is None
    assert len(caplog.records) == 1
    assert "the header Metadata-Flavor: Google" in caplog.text


@pytest.mark.parametrize("hidden", ["preempted", "maintenance-event"])
def test_where_one_of_both_is_hidden_the_other_is_seen(hidden: str, caplog: pytest.LogCaptureFixture) -> None:
    gce = Gce()
    del gce.values[hidden]
    with Server(gce) as server, started(source(server)) as notice:
        server.wait_for(5)
        assert notice.notice() is None
        assert len(caplog.records) == 1
        assert "expected status 200, found status 404" in caplog.text
        gce.values |= {"preempted": "TRUE"} if hidden != "preempted" else {"maintenance-event": TERMINATE}
        until(notice.notice)


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match="GceNotice: on_maintenance: expected one of 'terminate', 'any'"):
        jct.GceNotice(on_maintenance="migrate")  # type: ignore[arg-type]
