"""Events of a history with the fields that a report shows; a field of an unexpected kind counts as not given."""

from __future__ import annotations

import datetime
import math
from typing import Any

from jaxckpt_train.steps.run_events import RunEvent, Seconds


class ReportEvent(RunEvent, gc=False):
    """One event: what all events have, the fields that goodput is made of, and others, which may hold anything."""

    decide_s: Seconds = math.nan  # not given, which is not the same as no time
    wait_s: Seconds = math.nan
    name: Any = None
    bytes: Any = None
    bytes_per_s: Any = None
    reason: Any = None
    error: Any = None
    metrics: Any = None
    device_wait_s: Any = None
    snapshot_s: Any = None
    stage_s: Any = None
    write_s: Any = None
    commit_s: Any = None
    restore_s: Any = None
    skipped: Any = None
    plan: Any = None
    problem: Any = None
    host: Any = None
    pid: Any = None
    slurm_job_id: Any = None
    slurm_restart_count: Any = None

    @property
    def utc(self) -> datetime.datetime:
        """Its time, in UTC."""
        return self.time.astimezone(datetime.UTC)

    def before(self, seconds: float) -> datetime.datetime:
        """The time a number of seconds before it, in UTC."""
        return self.utc - datetime.timedelta(seconds=seconds)


def number(value: object) -> float | None:
    """A field that is a number of seconds, bytes or bytes a second; None: it is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1e18 and math.isfinite(value) else None


def count(value: object) -> int | None:
    """A field that is a whole number; None: it is not."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 60
    return value if is_one else None  # type: ignore[return-value]  # mypy does not follow is_one


def text(value: object) -> str:
    """A field that is text; empty if it is not."""
    return value if isinstance(value, str) else ""


def texts(value: object) -> tuple[str, ...]:
    """A field that is a list of texts, without what is no text in it; empty if it is not."""
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
