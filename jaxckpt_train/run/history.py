"""The history of a run: one JSON line for each save, restore, deletion, preemption, start and end.

`History` appends and reads events. `RunLog` records the start, the progress and the end of one process. `RunEvent`
holds the fields that statistics use. The module also converts metrics to numbers that JSON can hold.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from jaxckpt_train._validation import is_url, shown
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.metrics.events import Feeds, Sink
from jaxckpt_train.pending import call_within
from jaxckpt_train.run.history_objects import ObjectHistory
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.files import read_blocks, read_end
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.process_identity import process_age_s, slurm_job, this_process
from jaxckpt_train.store.threads import free_in_child
from jaxckpt_train.store.timeouts import report_progress, time_limited

PREEMPTED, LATE, FINISHED, CLOSED = "preempted", "late", "finished", "closed"
Clock = Callable[[], datetime.datetime]
FIRST_YEAR, LAST_YEAR = 1971, 9000  # times outside are not from a clock
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
HISTORY_NAME = "history.jsonl"
MOST_BYTES = 1 << 30
"""Enough for more than two million events. A larger history is refused, but its end is still read."""
MOST_LISTED_BYTES = 256 << 20  # where all events are held in memory
BLOCK_BYTES = 4 << 20
MOST_LINE_BYTES = 16 << 20  # a longer line is not an event, and is not buffered
RECENT_BYTES = 8 << 20
MAX_LISTED = 5
T = TypeVar("T")
_log = logging.getLogger("jaxckpt_train")
# The interval of progress events, and its share of the time since the start: a month takes about 4 MB.
LEAST_S, MOST_S, SHARE = 9.0, 60.0, 0.02
_MAY_WAIT = ("start", "restore", "progress", "delete")  # on an object store: until another event, or for a minute
NOTE_S = 60.0  # the longest time that the loop waits for the disk
_resumes = itertools.count()  # counts the loops in this process that had their state


def utc_now() -> datetime.datetime:
    """The wall clock, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def run_facts() -> dict[str, str | int]:
    """The host and pid of this process, and in a Slurm job its id, as `sacct` takes it, and its restart count."""
    facts: dict[str, str | int] = {"host": this_process().host, "pid": os.getpid()}
    job = slurm_job()
    if job is not None:
        facts |= {"slurm_job_id": job.id, "slurm_restart_count": job.restarts}
    return facts


class RunEvent(msgspec.Struct):
    """The fields of an event that statistics use. All other fields are ignored."""

    event: str
    time: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    step: _Step | None = None
    completed: _Step | None = None  # by the loop, before a restore in it
    ok: bool | None = None
    tends: bool = False  # the process was a command such as `jaxckpt pin`
    how: str | None = None
    blocked_s: Seconds = 0.0
    save_s: Seconds = 0.0
    decide_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    resume_s: Seconds = 0.0
    process_age_s: Seconds | None = None
    cost_s: Seconds | None = None
    name: str | None = None
    tier: str | None = None

    def __post_init__(self) -> None:
        if not FIRST_YEAR <= self.time.year <= LAST_YEAR:
            raise ValueError("the time is out of range")


class History:
    """Appends to the history of a run. If the disk refuses, it logs a warning and does not stop the training."""

    def __init__(self, backend: Backend, directory: str) -> None:
        self._backend, self._directory = backend, directory
        self._is_ended = False  # whether the file certainly ends with a line break
        self._objects = ObjectHistory(backend, directory) if is_url(directory) else None
        self._feeds = Feeds()
        self._guard = threading.RLock()  # keeps the order of events the same for sinks and file
        free_in_child(self)

    def send_to(self, sinks: Sequence[Sink]) -> None:
        """Send each event to these sinks from now on, including events that the disk refuses."""
        self._feeds = Feeds(sinks)

    def finish(self, timeout_s: float, until: Callable[[], bool] | None) -> None:
        """Wait a few seconds at most until the sinks have received all events, and close the sinks of the run."""
        self._feeds.finish(timeout_s, until)

    def add(self, event: str, now: datetime.datetime, **fields: Any) -> None:
        """Append one event. Durations have names ending in `_s`; fields that are None are omitted."""
        record: dict[str, Any] = {"event": event, "time": now.isoformat(timespec="milliseconds")}
        for name, value in fields.items():
            if isinstance(value, str):  # an error message may contain a path with arbitrary bytes
                record[name] = value.encode(errors="backslashreplace").decode()
            elif value is not None:
                record[name] = round(value, 6) if isinstance(value, float) and name.endswith("_s") else value
        line = msgspec.json.encode(record)
        if self._objects is not None:
            self._feeds.put(line)
            self._objects.add(line, may_wait=event in _MAY_WAIT)
            return
        with self._guard:
            self._feeds.put(line)  # before the disk, which may refuse or not answer
            self._append(line + b"\n")

    def write_late(self) -> None:
        """Write the events that have waited for a minute."""
        if self._objects is not None:
            self._objects.write_late()

    def end(self) -> None:
        """Write what has not been written, after the last event of this process."""
        if self._objects is not None:
            self._objects.finish()

    def _append(self, line: bytes) -> None:
        try:
            before = b"" if self._is_ended or self._ends_with_a_line() else b"\n"
            self._is_ended = False
            self._backend.append(f"{self._directory}/{HISTORY_NAME}", before + line)
            self._is_ended = True
        except StorageError as error:
            _log.warning("the history was not written: %s", error)

    def _ends_with_a_line(self) -> bool:
        """Whether the file ends with a complete line; else the next event would be appended to a broken one."""
        try:
            return read_end(self._backend, self._directory, HISTORY_NAME, 1) in (b"", b"\n")
        except CheckpointError as error:
            return getattr(error, "errno", None) == errno.ENOENT

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first. Damaged lines are left out with a warning.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read, or has more than 256 MiB.
        """
        return list(self.each(dict[str, Any], MOST_LISTED_BYTES))

    def each(self, kind: type[T], most_bytes: int = MOST_BYTES) -> Generator[T, None, int]:
        """Iterate over all events, oldest first: a history may be larger than memory.

        Events that do not fit `kind`, `dict[str, Any]` or a msgspec struct, are left out; lines that are not events
        are left out with a warning.

        Returns:
            The number of events that did not fit `kind`, without the lines that are not events.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read, or has more than `most_bytes` bytes.
        """
        decoder, left_out, unfit = msgspec.json.Decoder(kind), 0, 0
        path = f"{self._directory}/{HISTORY_NAME}"
        for number, line in enumerate(self._lines(most_bytes), 1):
            if not line:
                continue
            try:
                yield decoder.decode(line)
            except NOT_JSON:
                try:
                    msgspec.json.decode(line, type=dict[str, Any])
                    unfit += 1
                except NOT_JSON as error:
                    left_out += 1
                    if left_out <= MAX_LISTED:
                        _log.warning("%s: line %d is left out: %s", path, number, error)
        if left_out > MAX_LISTED:
            _log.warning("%s: and %d more lines are left out", path, left_out - MAX_LISTED)
        return unfit

    @time_limited
    def recent(self) -> list[RunEvent]:
        """The last events, oldest first. If the history cannot be read, logs a warning and returns none."""
        try:
            lines = self._last_lines()
        except CheckpointError as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                _log.warning("the history of earlier processes cannot be read: %s", error)
            return []
        decoder, found = msgspec.json.Decoder(RunEvent), list[RunEvent]()
        for line in lines:
            with contextlib.suppress(*NOT_JSON):  # the first line may be cut; `events` reports other damage
                found.append(decoder.decode(line))
        return found

    def _last_lines(self) -> list[bytes]:
        if self._objects is not None:
            return self._objects.recent(RECENT_BYTES)
        return read_end(self._backend, self._directory, HISTORY_NAME, RECENT_BYTES).split(b"\n")

    def _lines(self, most_bytes: int) -> Iterator[bytes]:
        if self._objects is not None:
            yield from self._objects.lines()
            return
        rest = b""
        try:
            for block in read_blocks(self._backend, self._directory, HISTORY_NAME, most_bytes, BLOCK_BYTES):
                report_progress()
                *lines, rest = (rest + block).split(b"\n")
                yield from lines
                if len(rest) > MOST_LINE_BYTES:
                    yield rest
                    rest = b""
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        yield rest


class RunLog:
    """Records one process in the history: its start, its progress and its end.

    A killed process has no end event; its last progress event shows how far it came.
    """

    def __init__(
        self, history: History, clock: Callable[[], datetime.datetime], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._history, self._clock, self._monotonic = history, clock, monotonic
        self.completed: int | None = None  # updates of the loop
        self.ends_as, self.tends = CLOSED, False  # tends: the process is a command without a loop
        self._began_at: float | None = None
        self._noted: tuple[float, int | None] = (0.0, None)

    def started(self, step: int | None = None) -> None:
        """Record that the process owns the run; `step`: the step that it had restored before."""
        self._began_at = self._monotonic()
        self._noted = self._began_at, None
        self._note("start", {"step": step, "tends": self.tends or None, **run_facts()})

    def resumed(self, step: int, resume_s: float) -> None:
        """Record that the loop has its state, `resume_s` seconds after its start."""
        if self._began_at is not None:
            self.completed = step
            self._noted = self._monotonic(), step
            is_first = next(_resumes) == 0  # the age of the process counts only for its first loop
            age_s = process_age_s() if is_first else None
            self._note("resumed", {"step": step, "resume_s": resume_s, "process_age_s": age_s})

    def _note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write the event on a helper thread; if the disk does not answer, the loop continues."""
        call_within(functools.partial(self._history.add, event, self._clock(), **fields), NOTE_S)

    def beat(self) -> None:
        """Record the progress of the loop, if the last event is old enough. Called every few seconds."""
        self._history.write_late()
        now, (at, step) = self._monotonic(), self._noted
        began_at, completed = self._began_at, self.completed  # read once: other threads change them
        if began_at is None or completed in (None, step):
            return
        if now - at >= max(LEAST_S, min(MOST_S, SHARE * (now - began_at))):
            self._noted = now, completed
            self._history.add("progress", self._clock(), step=completed)

    def ended(self) -> None:
        """Record that the process releases the run."""
        if self._began_at is not None:
            self._began_at = None
            self._history.add("end", self._clock(), how=self.ends_as, step=self.completed)
            self._history.end()


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert metrics to Python floats. Waits for devices that still compute them.

    Raises:
        SettingsError: a name is not valid Unicode text, or a value is not a single number.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise SettingsError(f"metrics: expected a mapping of names to numbers, found {shown(metrics)}")
    plain = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise SettingsError(f"metrics: expected names as text, found {name!r}")
        try:
            name.encode()
            plain[name] = float(_single(value))
        except UnicodeEncodeError as error:
            raise SettingsError(f"metrics: expected names of valid Unicode, found {name!r}; rename it") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise SettingsError(f"metric {name!r}: expected a single number, found {shown(value)}") from error
    return plain


def _single(value: Any) -> Any:
    """Return the scalar value of a metric; text and masked values are errors, even text that spells a number."""
    if np.ma.is_masked(value):
        raise TypeError("masked")
    single = np.asarray(value).item()
    if isinstance(single, str | bytes):
        raise TypeError("text")
    return single


def savable_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics; if they are invalid, log a warning and return none, so that the save still happens."""
    try:
        return plain_metrics(metrics)
    except SettingsError as error:
        _log.warning("saved without metrics: %s", error)
        return {}


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Convert metrics for JSON: `nan` and `inf` become text, which `metrics_from_json` reads."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
