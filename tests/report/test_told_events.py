"""Events are told with the fields that are what they should be."""

from __future__ import annotations

import datetime
import math

import pytest

from jaxckpt_train.report.told_events import told_events
from tests.steps.events import at


def test_what_is_no_event_is_counted_and_left_out() -> None:
    events = [at(0, "start"), {"event": "save"}, {"time": "2026"}, {"event": 3, "time": "x"}, at(1, "save", step="9")]
    found, left_out = told_events([*events, at(2, "end")])
    assert ([each.kind for each in found], left_out) == (["start", "end"], 4)


@pytest.mark.parametrize("value", [True, "12", None, -1.0, math.nan, math.inf, 1e30, [3]])
def test_a_field_that_is_no_number_counts_as_not_told(value: object) -> None:
    ((told,), _) = told_events([at(0, "x", bytes=value)])
    assert told.number("bytes") is None
    assert told.count("bytes") is None


def test_fields_are_told_by_their_kind() -> None:
    ((told,), _) = told_events([at(0, "x", bytes=5, rate=2.5, name="a", skipped=["b", 3, "c"])])
    assert (told.number("bytes"), told.count("bytes"), told.number("rate"), told.count("rate")) == (5.0, 5, 2.5, None)
    assert (told.text("name"), told.text("bytes"), told.text("none")) == ("a", "", "")
    assert (told.texts("skipped"), told.texts("name")) == (("b", "c"), ())


def test_times_are_in_utc_whatever_the_zone_they_were_told_in() -> None:
    ((told,), _) = told_events([{"event": "x", "time": "2026-03-01T14:30:00+02:00"}])
    assert told.time == datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
    assert told.time.utcoffset() == datetime.timedelta(0)
    assert told.before(90) == datetime.datetime(2026, 3, 1, 12, 28, 30, tzinfo=datetime.UTC)
