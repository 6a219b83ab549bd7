"""Events of a history to test with, as a run notes them."""

from __future__ import annotations

import datetime
from typing import Any

from jaxckpt_train.run.goodput import Attempt, attempts_of
from jaxckpt_train.run.history import run_events
from tests.support.runs import START


def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
    """An event so many seconds after the begin of the run."""
    time = START + datetime.timedelta(seconds=second)
    return {"event": event, "time": time.isoformat(timespec="milliseconds"), **fields}


def attempts(*events: dict[str, Any], **more: Any) -> list[Attempt]:
    """The processes that they tell of."""
    return attempts_of(run_events(events), **more)


def stretches(attempt: Attempt) -> list[tuple[int, int]]:
    """From which step to which it has come."""
    return [(each.first, each.last) for each in attempt.stretches]
