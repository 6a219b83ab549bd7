"""Events of a history, as a run records them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxckpt_train.run.goodput import Attempt, attempts_of
from jaxckpt_train.run.history import RunEvent
from tests.support.runs import START


def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
    """Return an event `second` seconds after the start of the run."""
    time = START + datetime.timedelta(seconds=second)
    return {"event": event, "time": time.isoformat(timespec="milliseconds"), **fields}


def run_events(events: Iterable[dict[str, Any]]) -> list[RunEvent]:
    """Return the valid events, in order."""
    found = []
    for event in events:
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(event, RunEvent))
    return found


def attempts(*events: dict[str, Any], **more: Any) -> list[Attempt]:
    """Return the processes that the events describe."""
    return attempts_of(run_events(events), **more)


def stretches(attempt: Attempt) -> list[tuple[int, int]]:
    """Return the first and last step of each stretch."""
    return [(each.first, each.last) for each in attempt.stretches]
