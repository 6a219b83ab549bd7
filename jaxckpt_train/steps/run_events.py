"""Events of a history as far as they tell of the processes of a run; what is damaged, or of others, is left out."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

FIRST_YEAR, LAST_YEAR = 1971, 9000  # what is outside no clock has told

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class RunEvent(msgspec.Struct):
    """What is looked at of an event; the rest of it may be anything. Fields as the history has them."""

    event: str
    time: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    step: _Step | None = None
    completed: _Step | None = None  # by a loop that goes back
    ok: bool | None = None
    tends: bool = False  # it took the directory for a command such as `jaxckpt pin`
    how: str | None = None
    blocked_s: Seconds = 0.0
    save_s: Seconds = 0.0
    decide_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    resume_s: Seconds = 0.0
    process_age_s: Seconds | None = None
    cost_s: Seconds | None = None

    def __post_init__(self) -> None:
        if not FIRST_YEAR <= self.time.year <= LAST_YEAR:
            raise ValueError("no time of a run")


def run_events(events: Iterable[Mapping[str, Any]]) -> Iterator[RunEvent]:
    """Those that are whole, in their order."""
    for event in events:
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(event, RunEvent)
