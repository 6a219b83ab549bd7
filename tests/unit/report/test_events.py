"""Fields of events are read if they have the expected type."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.report.gather import read_run
from jaxckpt_train.report.series import ReportEvent
from tests.support.history_events import at
from tests.support.report_runs import BACKEND, write_history


def event(**fields: Any) -> ReportEvent:
    return msgspec.convert({**at(0, "x"), **fields}, ReportEvent)


def test_invalid_events_are_counted_and_left_out(tmp_path: Path) -> None:
    events = [at(0, "start"), {"event": "save"}, {"time": "2026"}, {"event": 3, "time": "x"}, at(1, "save", step="9")]
    read = read_run(BACKEND, str(write_history(tmp_path, *events, at(2, "end"))))
    assert read.history.events == {"start": 1, "end": 1}
    assert read.warnings[0].startswith("4 lines ")


@pytest.mark.parametrize("fields", [{"bytes": -1}, {"bytes": "12"}, {"bytes_per_s": 1e30}, {"name": 3}, {"pid": True}])
def test_event_with_a_field_of_another_kind_is_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        event(**fields)


def test_event_times_are_converted_to_utc() -> None:
    found = event(time="2026-03-01T14:30:00+02:00")
    assert found.utc == datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
    assert found.utc.utcoffset() == datetime.timedelta(0)
