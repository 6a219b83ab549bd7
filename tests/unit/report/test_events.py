"""Fields of events are read if they have the expected type."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.report.gather import read_run
from jaxckpt_train.report.series import ReportEvent, count, number, text, texts
from tests.support.history_events import at
from tests.support.report_runs import BACKEND, NOW, write_history


def event(**fields: Any) -> ReportEvent:
    return msgspec.convert({**at(0, "x"), **fields}, ReportEvent)


def test_invalid_events_are_counted_and_left_out(tmp_path: Path) -> None:
    events = [at(0, "start"), {"event": "save"}, {"time": "2026"}, {"event": 3, "time": "x"}, at(1, "save", step="9")]
    read = read_run(BACKEND, str(write_history(tmp_path, *events, at(2, "end"))), NOW)
    assert read.history.events == {"start": 1, "end": 1}
    assert read.warnings[0].startswith("4 lines ")


@pytest.mark.parametrize("value", [True, "12", None, -1.0, math.nan, math.inf, 1e30, [3]])
def test_field_without_number_counts_as_missing(value: object) -> None:
    assert number(event(bytes=value).bytes) is None
    assert count(event(bytes=value).bytes) is None


def test_fields_are_read_by_their_kind() -> None:
    found = event(bytes=5, bytes_per_s=2.5, name="a", skipped=["b", 3, "c"])
    assert (number(found.bytes), count(found.bytes), number(found.bytes_per_s), count(found.bytes_per_s)) == (
        5.0, 5, 2.5, None
    )  # fmt: skip
    assert (text(found.name), text(found.bytes), text(found.reason)) == ("a", "", "")
    assert (texts(found.skipped), texts(found.name)) == (("b", "c"), ())
    assert [number(each) for each in (event().decide_s, event(decide_s=0.0).decide_s)] == [None, 0.0]


def test_event_times_are_converted_to_utc() -> None:
    found = event(time="2026-03-01T14:30:00+02:00")
    assert found.utc == datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
    assert found.utc.utcoffset() == datetime.timedelta(0)
    assert found.before(90) == datetime.datetime(2026, 3, 1, 12, 28, 30, tzinfo=datetime.UTC)
