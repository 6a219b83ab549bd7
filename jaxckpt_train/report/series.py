"""The events and series that a report shows: saves, restores, marks, the life of each step, and metrics by step.

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

from jaxckpt_train.inspection.runs import StepStatus
from jaxckpt_train.run.entry import parse_step_name
from jaxckpt_train.run.history import RunEvent, Seconds
from jaxckpt_train.store.manifest import metrics_from_json

PHASES = ("decide_s", "wait_s", "device_wait_s", "snapshot_s", "stage_s", "write_s", "commit_s")
MOST_BYTES = 5_000_000  # of a page; the drawing library takes 1.25 MB
MOST_KEPT = 20_000  # of a stream, so that the memory is bounded
STATES = ("kept", "pinned", "temporary", "left behind", "damaged", "not committed", "deleted", "gone")
Item = TypeVar("Item")
_Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class ReportEvent(RunEvent, gc=False):
    """An event with the fields that a report shows."""

    name: str = ""
    bytes: _Whole | None = None
    taken_bytes: _Whole = 0
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
    tier: str = "slow"
    ahead_steps: _Whole | None = None
    drain_s: Seconds | None = None
    lag_s: Seconds | None = None
    lag_steps: _Whole | None = None
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
    written_bytes: int | None  # without the files of the step before
    bytes_per_s: float | None
    metrics: dict[str, float]
    tier: str  # "slow" or "fast"


@dataclasses.dataclass(frozen=True)
class Restore:
    """A restore of a step; `skipped` has the names of the damaged steps that were skipped.

    From the fast tier, it was `ahead_steps` newer than the newest step in the run directory.
    """

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    bytes: int | None
    restore_s: float | None
    bytes_per_s: float | None
    skipped: tuple[str, ...]
    tier: str  # "slow" or "fast"
    ahead_steps: int | None


@dataclasses.dataclass(frozen=True)
class Drain:
    """A copy of a step of the fast tier to the run directory; the lag is that behind the save and the fast tier."""

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    bytes: int | None
    drain_s: float | None
    lag_s: float | None
    lag_steps: int | None


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
        written_bytes=None if event.bytes is None else max(0, event.bytes - event.taken_bytes),
        bytes_per_s=event.bytes_per_s if event.ok else None,
        metrics=metrics_from_json(event.metrics),
        tier=event.tier,
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
        tier=event.tier,
        ahead_steps=event.ahead_steps,
    )


def drain_of(event: ReportEvent) -> Drain:
    """Return the copy to the run directory that an event records."""
    return Drain(
        began=event.utc - datetime.timedelta(seconds=event.drain_s or 0.0),
        ended=event.utc,
        step=event.step,
        name=event.name,
        bytes=event.bytes,
        drain_s=event.drain_s,
        lag_s=event.lag_s,
        lag_steps=event.lag_steps,
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


@dataclasses.dataclass(slots=True, eq=False)
class StepLife:
    """One committed generation of a step, or a directory that should be one."""

    name: str  # of the directory, which may be used again after a deletion
    step: int
    saved: datetime.datetime | None = None
    deleted: datetime.datetime | None = None
    left: datetime.datetime | None = None  # when a save after a restore of an earlier step abandoned this step
    set_aside: datetime.datetime | None = None
    bytes: int | None = None  # of the data files; for a deleted step the size in the history
    is_there: bool = False
    is_committed: bool = True
    is_current: bool = True  # whether the step belongs to the current branch of the run
    pinned: bool = False
    temporary: bool = False
    problem: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # until they are added to the series

    @property
    def state(self) -> str:
        """The state of the step, one of `STATES`; the most important one if several apply."""
        if not self.is_there:
            return "gone" if self.deleted is None else "deleted"
        if not self.is_committed:
            return "not committed"
        if self.problem:
            return "damaged"
        if not self.is_current:
            return "left behind"
        return "pinned" if self.pinned else "temporary" if self.temporary else "kept"


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """The number of steps and their bytes from a time on."""

    time: datetime.datetime
    steps: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StepsFound:
    """The lives of all steps in the order of their saves, the disk use, the metrics, and how many there are of each.

    All existing steps are included; of very many others, changes of the disk use and values, the newest ones.
    """

    lives: list[StepLife]
    states: dict[str, int]
    uses: list[DiskUse]
    changes: int
    metrics: dict[str, list[MetricValue]]
    values: dict[str, int]


class Lives:
    """Follows the steps of the run directory through the events of its history."""

    def __init__(self) -> None:
        self._there: dict[str, StepLife] = {}  # in the order of the saves
        self._ended = collections.deque[StepLife]()  # the newest ones, which may still be left behind
        self._last = -1  # the last saved step
        self._skipped: list[StepLife] = []  # later than the restored step: abandoned once the run saves
        self._states = collections.Counter[str]()
        self._series: dict[str, Newest[tuple[int, float]]] = {}  # the step and value of each metric
        self._changes = 0  # of the disk use

    def add(self, event: ReportEvent) -> None:
        """Add the next event."""
        kind, name = event.event, event.name
        if kind == "save" and event.ok and event.tier == "fast":
            self._add_metrics(event.step or 0, metrics_from_json(event.metrics))
        elif kind == "drain" or (kind == "save" and event.ok):
            self._saved(event)
        elif kind == "delete":
            self._deleted(event)
        elif kind == "set_aside" and name in self._there:
            self._there[name].set_aside = event.utc
        elif kind == "restore" and parse_step_name(name) is not None:
            self._restored(name)
        elif kind == "start" and event.step is not None:  # the process restored this step before it took the directory
            same = [life.name for life in self._there.values() if life.step == event.step]
            self._restored(same[-1] if same else "")

    def _restored(self, name: str) -> None:
        later = itertools.dropwhile(lambda life: life.name != name, self._there.values())
        self._skipped = list(later)[1:]

    def _saved(self, event: ReportEvent) -> None:
        name, parsed = event.name, parse_step_name(event.name)
        if parsed is None:
            return
        step, time = parsed[0], event.utc
        above: list[StepLife] = []
        if step <= self._last:  # otherwise no step is above it
            above = [life for life in self._there.values() if life.step >= step and life.name != name]
        self._last = step
        for life in [*self._skipped, *above]:
            life.left = life.left or time
        self._skipped = []
        removed = self._there.pop(name, None)
        if removed is not None:  # removed without an event
            self._end(removed)
        metrics = metrics_from_json(event.metrics)
        self._there[name] = StepLife(name, step, saved=time, bytes=event.bytes, metrics=metrics)

    def _deleted(self, event: ReportEvent) -> None:
        parsed = parse_step_name(event.name)
        if parsed is None:
            return
        life = self._there.pop(event.name, None) or StepLife(event.name, parsed[0])
        life.deleted = event.utc
        self._end(life)

    def _end(self, life: StepLife) -> None:
        self._ended.append(life)
        if len(self._ended) > MOST_KEPT:
            self._count(self._ended.popleft())

    def _count(self, life: StepLife) -> None:
        """Count a step, and add its metrics to the series."""
        state = life.state
        self._states[state] += 1
        if life.left is None and life.is_current:
            self._add_metrics(life.step, life.metrics)
        life.metrics = {}
        self._changes += len(_changes(life))

    def _add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._series.setdefault(name, Newest()).add((step, value))

    def found(self, looks: Sequence[StepStatus]) -> StepsFound:
        """Return the lives of all steps, after all events were added; `looks` are the existing steps."""
        for look in looks:
            self._add_existing(look)
        lives = [*self._ended, *self._there.values()]
        for life in lives:
            self._count(life)
        early = datetime.datetime.min.replace(tzinfo=datetime.UTC)
        lives.sort(key=lambda life: (life.saved or life.deleted or early, life.step, life.name))
        states = {state: self._states[state] for state in STATES if self._states[state]}
        return StepsFound(lives, states, _uses(lives), self._changes, *self._metrics())

    def _metrics(self) -> tuple[dict[str, list[MetricValue]], dict[str, int]]:
        """Return the values of each metric by step, and their numbers. Of values of one step, the last one counts."""
        found, counts = dict[str, list[MetricValue]](), dict[str, int]()
        for name, series in sorted(self._series.items(), key=lambda each: min(each[1].items)[0]):
            by_step = dict(series.items)
            found[name] = [MetricValue(step, by_step[step]) for step in sorted(by_step)]
            counts[name] = len(by_step) if series.count == len(series.items) else series.count
        return found, counts

    def _add_existing(self, look: StepStatus) -> None:
        entry = look.entry
        life = self._there.setdefault(look.name, StepLife(look.name, look.step))
        life.is_there, life.is_committed = True, entry is not None
        life.bytes = life.bytes if look.nbytes is None else look.nbytes
        life.problem = look.problem or ""
        life.is_current = look.is_current or entry is None
        life.left = None if life.is_current else life.left
        if entry is not None:
            life.pinned, life.temporary = entry.pinned, entry.temporary
            life.metrics = {**life.metrics, **(entry.metrics or {})}  # may include metrics of a later evaluation
            if life.saved is None and entry.time.year > 1970:  # otherwise its manifest cannot be read
                life.saved = entry.time.astimezone(datetime.UTC)


def _changes(life: StepLife) -> list[tuple[datetime.datetime, int, int]]:
    """Return when a step changed the disk use, by how many steps, and by how many bytes; none without its save."""
    if life.saved is None or life.state == "gone":
        return []
    nbytes = life.bytes or 0
    return [(life.saved, 1, nbytes), *([] if life.deleted is None else [(life.deleted, -1, -nbytes)])]


def _uses(lives: Sequence[StepLife]) -> list[DiskUse]:
    """Return the newest values of the disk use. Earlier ones miss the steps of which the lives are not known."""
    uses, steps, nbytes = collections.deque[DiskUse](maxlen=MOST_KEPT), 0, 0
    for time, more, size in sorted(change for life in lives for change in _changes(life)):
        steps, nbytes = steps + more, nbytes + size
        uses.append(DiskUse(time, steps, nbytes))
    return [*uses]
