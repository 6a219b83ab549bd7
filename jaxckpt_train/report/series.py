"""What happened when: the saves, restores, preemptions and other events of a run, with how long each took.

Metrics by step, of the line that the run descends from.

Leaves out items where there are too many to keep or draw; the one that stands out most in each group stays.

How fast the disk of a run takes bytes: measured by writing some into its directory, and removing them.

How much of a run a page holds: what is more is left out, and the page says so.

Events of a history with the fields that a report shows; a field of an unexpected kind counts as not given.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from jaxckpt_train.run.history import RunEvent, Seconds
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Files, Sink
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.manifest import metrics_from_json

MOST_BYTES = 5_000_000
"""Of a page. A megabyte and a quarter of it is the library that draws."""
BLOCK_BYTES = 8 << 20
BYTES = 256 << 20
TRIES = 3
THREADS = 2
MOST_KEPT = 10_000
"""How many items of a thinned stream are kept at least; at most twice this number."""
RECENT = 1000  # the last ones of a stream are all kept, as tables show them
BATCH = 4096
Item = TypeVar("Item")
MOST_VALUES = 500_000
"""Of all metrics together, held at once."""
MOST_NAMES = 1000
PHASES = ("decide_s", "wait_s", "device_wait_s", "snapshot_s", "stage_s", "write_s", "commit_s")


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


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most of each kind that is drawn.

    Attributes:
        points: of a metric, and of the room on the disk.
        changed_leaves: of all pairs of steps together.
        leaves: in the tree.
        leaf_letters: of their names together.
    """

    saves: int = 1500
    steps: int = 2000
    processes: int = 1000
    points: int = 1000
    changed_leaves: int = 4000
    leaves: int = 20_000
    leaf_characters: int = 1_000_000

    def halved(self) -> Limits:
        """Half of everything."""
        return Limits(*(max(1, getattr(self, field.name) // 2) for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class DiskRate:
    """The fastest of some writes of one file, each synced.

    Attributes:
        bytes_per_s: of the fastest.
        bytes: that each wrote.
        tries: how many there were.
    """

    bytes_per_s: float
    bytes: int
    tries: int


def measure_disk(files: Files, directory: str, nbytes: int = BYTES, tries: int = TRIES) -> DiskRate:
    """Write a file and sync it, again and again; it is removed whatever happens.

    Args:
        files: where.
        directory: that the file is put into.
        nbytes: how large it is, in whole blocks.
        tries: how often.

    Raises:
        StorageError: the file system refused, such as for want of space.
    """
    block = _block()
    blocks = max(1, nbytes // BLOCK_BYTES)
    seconds = min(_seconds(files, directory, block, blocks) for _ in range(tries))
    return DiskRate(blocks * BLOCK_BYTES / seconds, blocks * BLOCK_BYTES, tries)


def _block() -> np.ndarray:
    """Bytes that nothing compresses, where direct I/O takes them from."""
    block = aligned_buffer(BLOCK_BYTES)
    block[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
    return block


def _seconds(files: Files, directory: str, block: np.ndarray, blocks: int) -> float:
    path = f"{directory}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    began = time.perf_counter()
    try:
        sink: Sink = files.create(path, direct="auto")
        try:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="jaxckpt-disk") as pool:
                list(pool.map(lambda number: sink.write_at(number * BLOCK_BYTES, block), range(blocks)))
        except BaseException:
            sink.abandon()
            raise
        sink.finish(blocks * BLOCK_BYTES, sync=True)
        return time.perf_counter() - began
    finally:
        files.remove(path)


def thinned(items: Sequence[Item], most: int, weight: Callable[[Item], float], recent: int = 0) -> list[Item]:
    """Of each group of neighbours the item of the greatest weight, in order; all of them if they are few enough.

    Args:
        items: in order.
        most: how many may stay.
        weight: what stands out; equal ones: the first.
        recent: how many of the last items all stay, in addition to `most`.
    """
    older = max(0, len(items) - recent)
    if older <= most:
        return list(items)
    edges = [older * number // most for number in range(most + 1)]
    return [max(items[start:stop], key=weight) for start, stop in itertools.pairwise(edges)] + list(items[older:])


class Sample(Generic[Item]):
    """Items of a stream: all of them while they are few, else the heaviest of each group, and all recent ones.

    All groups have the same size, which doubles whenever there are too many groups.

    Args:
        weight: what stands out in a group.
        most: how many groups there are at least, once items are left out; at most twice as many.
    """

    def __init__(self, weight: Callable[[Item], float], most: int = MOST_KEPT) -> None:
        self._weight, self._most = weight, most
        self._kept: list[Item] = []  # one item of each group
        self._group = 1  # the size of a group
        self._grouped = 0  # how many items the groups had
        self._recent: list[Item] = []

    def __len__(self) -> int:
        return len(self._kept) + len(self._recent)

    @property
    def count(self) -> int:
        """How many items there were."""
        return self._grouped + len(self._recent)

    @property
    def items(self) -> list[Item]:
        """The items that are kept, in order."""
        return [*self._kept, *self._recent]

    def add(self, item: Item) -> None:
        """Add the next item."""
        self._recent.append(item)
        if len(self._recent) >= BATCH + RECENT:
            self._put_into_groups(BATCH)

    def _put_into_groups(self, count: int) -> None:
        count -= count % self._group
        starts = range(0, count, self._group)
        self._kept += [max(self._recent[at : at + self._group], key=self._weight) for at in starts]
        self._grouped += count
        del self._recent[:count]
        if len(self._kept) > 2 * self._most:
            self.halve()

    def halve(self) -> None:
        """Join each two groups to one."""
        pairs = (self._kept[at : at + 2] for at in range(0, len(self._kept), 2))
        self._kept = [max(pair, key=self._weight) for pair in pairs]
        self._group *= 2


@dataclasses.dataclass(frozen=True)
class MetricValue:
    """What a metric was at a step; may be nan or infinite."""

    step: int
    value: float


class MetricSeries:
    """Collects the metrics of steps; of very many values it keeps the largest of each group of neighbours."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample[tuple[int, float]]] = {}
        self._held = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add those of a step; of a step that was added before, the new ones count."""
        for name, value in metrics.items():
            sample = self._samples.get(name)
            if sample is None:
                if len(self._samples) == MOST_NAMES:
                    continue
                sample = self._samples[name] = Sample(_size, MOST_VALUES)
            sample.add((step, value))
        self._held += len(metrics)
        if self._held > MOST_VALUES:
            for sample in self._samples.values():
                sample.halve()
            self._held = sum(map(len, self._samples.values()))

    def found(self) -> tuple[dict[str, list[MetricValue]], dict[str, int]]:
        """The values of each metric, lowest step first, and how many there were."""
        found, counts = dict[str, list[MetricValue]](), dict[str, int]()
        for name, sample in sorted(self._samples.items(), key=lambda each: min(each[1].items)[0]):
            by_step = dict(sample.items)
            found[name] = [MetricValue(step, by_step[step]) for step in sorted(by_step)]
            counts[name] = len(by_step) if sample.count == len(sample) else sample.count
        return found, counts


def _size(each: tuple[int, float]) -> float:
    return -1.0 if math.isnan(each[1]) else abs(each[1])


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that was committed, or has failed.

    Attributes:
        began, ended: from the call to the commit, without the time in which devices computed queued updates.
        blocked_s: that the loop was held up.
        background_s: the rest of it.
        phases: seconds of each that was told.
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
    """A step that was restored; `skipped`: the names of damaged ones that were passed over."""

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
    """Another event that a reader wants to see: a preemption, a step set aside, a lock taken over."""

    time: datetime.datetime
    kind: str
    step: int | None
    text: str


def save_s_of(event: ReportEvent) -> float:
    """Seconds of a save from the call to the commit, without the time in which devices computed queued updates."""
    return max(event.save_s - min(event.save_s, number(event.device_wait_s) or 0.0), event.blocked_s)


def save_of(event: ReportEvent) -> Save:
    """The save that an event is about."""
    save_s = save_s_of(event)
    phases = {name: value for name in PHASES if (value := number(getattr(event, name))) is not None}
    return Save(
        began=event.before(save_s),
        ended=event.utc,
        step=event.step,
        name=text(event.name),
        ok=event.ok is True,
        reason=text(event.reason),
        error=text(event.error),
        blocked_s=event.blocked_s,
        background_s=save_s - event.blocked_s,
        save_s=save_s,
        phases=phases,
        bytes=count(event.bytes),
        bytes_per_s=number(event.bytes_per_s) if event.ok else None,
        metrics=metrics_from_json(event.metrics),
    )


def restore_of(event: ReportEvent) -> Restore:
    """The restore that an event is about."""
    restore_s = number(event.restore_s)
    return Restore(
        began=event.before(min(restore_s or 0.0, 1e9)),
        ended=event.utc,
        step=event.step,
        name=text(event.name),
        bytes=count(event.bytes),
        restore_s=restore_s,
        bytes_per_s=number(event.bytes_per_s),
        skipped=texts(event.skipped),
    )


def mark_of(event: ReportEvent) -> Mark | None:
    """The mark of an event that is neither a save nor a restore; None: it is not worth one."""
    if event.event == "preempted":
        about = "; ".join(filter(None, (text(event.reason), text(event.plan))))
    elif event.event == "set_aside":
        about = f"{text(event.name)}: {text(event.problem)}"
    elif event.event == "take_over":
        about = f"from process {count(event.pid)} on {text(event.host)}"
    else:
        return None
    return Mark(event.utc, event.event, event.step, about)
