"""The events and series that a report shows: saves, restores, marks, and metrics by step.

Of very long series, `Newest` holds the end, and `thinned` chooses what is drawn.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from jaxckpt_train.run.history import RunEvent, Seconds
from jaxckpt_train.store.manifest import metrics_from_json

PHASES = ("decide_s", "wait_s", "device_wait_s", "snapshot_s", "stage_s", "write_s", "commit_s")
MOST_BYTES = 5_000_000  # of a page; the drawing library takes 1.25 MB
MOST_KEPT = 20_000  # of a stream, so that the memory is bounded
Item = TypeVar("Item")
_Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class ReportEvent(RunEvent, gc=False):
    """An event with the fields that a report shows."""

    name: str = ""
    bytes: _Whole | None = None
    bytes_per_s: _Rate | None = None
    reason: str = ""
    error: str = ""
    metrics: Any = None
    device_wait_s: Seconds | None = None
    snapshot_s: Seconds | None = None
    stage_s: Seconds | None = None
    write_s: Seconds | None = None
    commit_s: Seconds | None = None
    restore_s: Seconds | None = None
    skipped: tuple[str, ...] = ()
    plan: str = ""
    problem: str = ""
    host: str = ""
    pid: _Whole | None = None
    slurm_job_id: str = ""
    slurm_restart_count: _Whole = 0

    @property
    def utc(self) -> datetime.datetime:
        """The time of the event in UTC."""
        return self.time.astimezone(datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that was committed or failed, from the call to the commit.

    The time in which devices computed queued updates is left out.
    """

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    ok: bool
    reason: str
    error: str
    blocked_s: float
    background_s: float
    save_s: float
    phases: dict[str, float]
    bytes: int | None
    bytes_per_s: float | None
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Restore:
    """A restore of a step; `skipped` has the names of the damaged steps that were skipped."""

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    bytes: int | None
    restore_s: float | None
    bytes_per_s: float | None
    skipped: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Another event to mark: a preemption, a step that was set aside, a lock that was taken over."""

    time: datetime.datetime
    kind: str
    step: int | None
    text: str


def save_of(event: ReportEvent) -> Save:
    """Return the save that an event records."""
    save_s = max(event.save_s - min(event.save_s, event.device_wait_s or 0.0), event.blocked_s)
    return Save(
        began=event.utc - datetime.timedelta(seconds=save_s),
        ended=event.utc,
        step=event.step,
        name=event.name,
        ok=event.ok is True,
        reason=event.reason,
        error=event.error,
        blocked_s=event.blocked_s,
        background_s=save_s - event.blocked_s,
        save_s=save_s,
        phases={name: value for name in PHASES if (value := getattr(event, name)) is not None},
        bytes=event.bytes,
        bytes_per_s=event.bytes_per_s if event.ok else None,
        metrics=metrics_from_json(event.metrics),
    )


def restore_of(event: ReportEvent) -> Restore:
    """Return the restore that an event records."""
    return Restore(
        began=event.utc - datetime.timedelta(seconds=event.restore_s or 0.0),
        ended=event.utc,
        step=event.step,
        name=event.name,
        bytes=event.bytes,
        restore_s=event.restore_s,
        bytes_per_s=event.bytes_per_s,
        skipped=event.skipped,
    )


def mark_of(event: ReportEvent) -> Mark | None:
    """Return the mark of a preemption or similar event, or None for any other event."""
    if event.event == "preempted":
        about = "; ".join(filter(None, (event.reason, event.plan)))
    elif event.event == "set_aside":
        about = f"{event.name}: {event.problem}"
    elif event.event == "take_over":
        about = f"from process {event.pid} on {event.host}"
    else:
        return None
    return Mark(event.utc, event.event, event.step, about)


@dataclasses.dataclass(frozen=True)
class MetricValue:
    """The value of a metric at a step; may be NaN or infinite."""

    step: int
    value: float


def thinned(items: Sequence[Item], most: int, weight: Callable[[Item], float]) -> list[Item]:
    """Return the item of the greatest weight of each of `most` groups of neighbours."""
    if len(items) <= most:
        return list(items)
    edges = [len(items) * number // most for number in range(most + 1)]
    return [max(items[start:stop], key=weight) for start, stop in itertools.pairwise(edges)]


class Newest(Generic[Item]):
    """The newest items of a stream, and the number of all of them."""

    def __init__(self) -> None:
        self.items = collections.deque[Item](maxlen=MOST_KEPT)
        self.count = 0

    def add(self, item: Item) -> None:
        """Add the next item."""
        self.items.append(item)
        self.count += 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most items of each kind to draw."""

    saves: int = 1500
    steps: int = 2000
    processes: int = 1000
    points: int = 1000  # of a metric, and of the disk use
    changed_leaves: int = 4000  # of all pairs of steps together
    leaves: int = 20_000  # in the tree

    def halved(self) -> Limits:
        """Return limits that are half as large."""
        return Limits(*(max(1, getattr(self, field.name) // 2) for field in dataclasses.fields(self)))
