"""Notices of Google Compute Engine, from a local server that imitates its metadata server."""

from __future__ import annotations

from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.metadata_servers import Gce, Handler, Server, send, started, until

PATHS = ["GET /computeMetadata/v1/instance/preempted", "GET /computeMetadata/v1/instance/maintenance-event"]
TERMINATE, MIGRATE = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"


def source(server: Server, **options: Any) -> jct.GceNotice:
    return jct.GceNotice(**{"url": server.url, "poll_s": 0.01, **options})


def test_preempted_spot_vm_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
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
def test_host_maintenance_follows_the_setting(
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


def test_answer_without_google_header_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    def respond(handler: Handler, server: Server) -> None:
        send(handler, 200, b"TRUE" if handler.path.endswith("preempted") else TERMINATE.encode())

    with Server(respond) as server, started(source(server)) as notice:
        server.wait_for(6)
        assert notice.notice() is None
    assert len(caplog.records) == 1
    assert "the header Metadata-Flavor: Google" in caplog.text


@pytest.mark.parametrize("hidden", ["preempted", "maintenance-event"])
def test_one_missing_value_does_not_hide_other(hidden: str, caplog: pytest.LogCaptureFixture) -> None:
    gce = Gce()
    del gce.values[hidden]
    with Server(gce) as server, started(source(server)) as notice:
        server.wait_for(5)
        assert notice.notice() is None
        assert len(caplog.records) == 1
        assert "found status 404" in caplog.text
        gce.values |= {"preempted": "TRUE"} if hidden != "preempted" else {"maintenance-event": TERMINATE}
        until(notice.notice)


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match="GceNotice: on_maintenance: expected one of"):
        jct.GceNotice(on_maintenance="migrate")  # type: ignore[arg-type]
