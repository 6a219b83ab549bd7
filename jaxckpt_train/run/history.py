"""Notes in the history when a process of a run begins, how far it has come now and then, and how it ends.

The history: one JSON line for every save, restore, deletion and preemption of a run.

Events of a history as far as they tell of the processes of a run; what is damaged, or of others, is left out.

What tells one start of a run from another: host, process, and the Slurm job with its restarts.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from jaxckpt_train._validation import shown
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.metrics.events import Feeds, Sink
from jaxckpt_train.pending import call_within
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.files import read_blocks, read_end, read_ends
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.process_identity import ProcessIdentity, process_age_s, slurm_job, this_process
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.threads import free_in_child

PREEMPTED, LATE, FINISHED, CLOSED = "preempted", "late", "finished", "closed"
Clock = Callable[[], datetime.datetime]
FIRST_YEAR, LAST_YEAR = 1971, 9000  # what is outside no clock has told
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
HISTORY_NAME = "history.jsonl"
MOST_BYTES = 1 << 30
"""More than two million events take; of a larger file both ends are read."""
MOST_LISTED_BYTES = 256 << 20  # where all events are in memory at once
BLOCK_BYTES = 4 << 20
MOST_LINE_BYTES = 16 << 20  # what is longer is no event, and is not put together
RECENT_BYTES = 8 << 20
MAX_LISTED = 5
T = TypeVar("T")
_log = logging.getLogger("jaxckpt_train")
# Between two notes of how far it has come: those of a month are some 4 MB.
LEAST_S, MOST_S, SHARE = 9.0, 60.0, 0.02
NOTE_S = 60.0  # that the loop waits for a disk to take a note
_resumes = itertools.count()  # counts the loops of this process that have had their state


def utc_now() -> datetime.datetime:
    """The wall clock, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def run_facts() -> dict[str, str | int]:
    """The facts of this process, in types that JSON has.

    Returns:
        `host` and `pid`; in a job of Slurm also `slurm_job_id`, as `scontrol` and `sacct` take it ("1234", "1200_7"),
        and `slurm_restart_count`, which is 0 in the first start.
    """
    facts: dict[str, str | int] = {"host": this_process().host, "pid": os.getpid()}
    job = slurm_job()
    if job is not None:
        facts |= {"slurm_job_id": job.id, "slurm_restart_count": job.restarts}
    return facts


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


class History:
    """Appends to the history of a run. A disk that refuses the history warns and never stops a training."""

    def __init__(self, backend: Backend, directory: str) -> None:
        self._backend, self._directory = backend, directory
        self._is_ended = False  # whether the last line surely is
        self._feeds = Feeds()
        self._guard = threading.RLock()  # sinks are told in the order of the lines
        free_in_child(self)

    def send_to(self, sinks: Sequence[Sink]) -> None:
        """Have sinks told of each event from now on, also of one that the disk refuses."""
        self._feeds = Feeds(sinks)

    def finish(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Wait until the sinks were told of all events, for a few seconds at most, and close those of the run's own."""
        self._feeds.finish(timeout_s, until)

    def add(self, event: str, now: datetime.datetime, **fields: Any) -> None:
        """Append one event; seconds end in `_s`, None fields are left out."""
        record: dict[str, Any] = {"event": event, "time": now.isoformat(timespec="milliseconds")}
        for name, value in fields.items():
            if value is not None:
                record[name] = round(value, 6) if isinstance(value, float) and name.endswith("_s") else value
        line = _encoded(record)
        with self._guard:
            self._feeds.put(line)  # first: the disk may refuse it, or not answer
            self._append(line + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            before = b"" if self._is_ended or self._ends_with_a_line() else b"\n"
            self._is_ended = False
            self._backend.append(f"{self._directory}/{HISTORY_NAME}", before + line)
            self._is_ended = True
        except StorageError as error:
            _log.warning("the history was not written: %s", error)

    def _ends_with_a_line(self) -> bool:
        """Whether no crash, or damage, has left half a line, which would take the next event with it."""
        try:
            ends = read_ends(self._backend, self._directory, HISTORY_NAME, 2)
        except CheckpointError as error:
            return getattr(error, "errno", None) == errno.ENOENT
        return ends[-1][1][-1:] in (b"", b"\n")

    def events(self) -> list[dict[str, Any]]:
        """All events so far, oldest first; what is no event, or is too much, is left out with a warning.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read.
        """
        return list(self.each(dict[str, Any], MOST_LISTED_BYTES))

    def each(self, kind: type[T], most_bytes: int = MOST_BYTES) -> Generator[T, None, int]:
        """All events so far, oldest first, one at a time: a history may be larger than memory.

        Args:
            kind: of what is yielded: `dict[str, Any]`, or a struct of msgspec with the fields that matter. Events that
                do not fit it are left out; what is no event is left out with a warning.
            most_bytes: of a larger history both ends are read, with a warning.

        Returns:
            How many events did not fit `kind`; what is no event is not counted.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read.
        """
        decoder, left_out, unfit = msgspec.json.Decoder(kind), 0, 0
        path = f"{self._directory}/{HISTORY_NAME}"
        for number, line in enumerate(self._lines(most_bytes), 1):
            if not line:
                continue
            try:
                yield decoder.decode(line)
            except NOT_JSON:
                error = _why_no_event(line)
                unfit += error is None
                left_out += error is not None
                if error is not None and left_out <= MAX_LISTED:
                    _log.warning("%s: line %d is left out: %s", path, number, error)
        if left_out > MAX_LISTED:
            _log.warning("%s: and %d more lines are left out", path, left_out - MAX_LISTED)
        return unfit

    def recent(self) -> list[dict[str, Any]]:
        """The last events, oldest first; none if the history cannot be read, which is told."""
        try:
            last = read_end(self._backend, self._directory, HISTORY_NAME, RECENT_BYTES)
        except CheckpointError as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                _log.warning("what the history says of earlier processes is not known: %s", error)
            return []
        found = []
        for line in last.split(b"\n"):
            with contextlib.suppress(*NOT_JSON):  # the first one may be half a line, and `events` tells of others
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
        return found

    def _lines(self, most_bytes: int) -> Iterator[bytes]:
        rest, end = b"", 0
        try:
            for at, block in read_blocks(self._backend, self._directory, HISTORY_NAME, most_bytes, BLOCK_BYTES):
                if at != end:
                    path = f"{self._directory}/{HISTORY_NAME}"
                    text = "%s: too large to be read whole: what lies in the middle, to byte %d, is left out"
                    _log.warning(text, path, at)
                    yield rest
                    rest = b""
                *lines, rest = (rest + block).split(b"\n")
                end = at + len(block)
                yield from lines
                if len(rest) > MOST_LINE_BYTES:
                    yield rest
                    rest = b""
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        yield rest


def _why_no_event(line: bytes) -> Exception | None:
    """What is wrong with a line; None: it is an event."""
    try:
        msgspec.json.decode(line, type=dict[str, Any])
    except NOT_JSON as error:
        return error
    return None


def _encoded(record: Mapping[str, Any]) -> bytes:
    """A record as one line; what of its text is no Unicode is written as `\\udc80`."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:  # a path within the text of an error may hold any bytes
        return msgspec.json.encode(_as_unicode(record))


def _as_unicode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_as_unicode(key): _as_unicode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_unicode(item) for item in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as Python floats; waits for devices that still compute them.

    Raises:
        SettingsError: a name is not text that can be stored, or a value is not a single number.
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
    """The one Python value of a metric; text is none, also if it spells a number, nor is what is masked."""
    if np.ma.is_masked(value):
        raise TypeError("masked")
    single = np.asarray(value).item()
    if isinstance(single, str | bytes):
        raise TypeError("text")
    return single


def savable_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics, or none with a warning if they are no numbers: they must not cost a save that has to be."""
    try:
        return plain_metrics(metrics)
    except SettingsError as error:
        _log.warning("saved without metrics: %s", error)
        return {}


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON can hold them, `nan` and `inf` as text; `metrics_from_json` reads them."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


class RunLog:
    """Of one process. A process that was killed has noted no end: the last note says how far it had come by then.

    Args:
        history: of the run.
        clock: the time, with a time zone.
        monotonic: the time in seconds.

    Attributes:
        completed: how many updates are complete; None: nobody has said.
        tends: whether the process takes the run for a command, and has no loop.
        ends_as: how it ends: "closed", or what whoever knows better has set.
    """

    def __init__(
        self,
        history: History,
        clock: Callable[[], datetime.datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history, self._clock, self._monotonic = history, clock, monotonic
        self.completed: int | None = None
        self.ends_as, self.tends = CLOSED, False
        self._began_at: float | None = None
        self._noted: tuple[float, int | None] = (0.0, None)

    def took_over(self, dead: ProcessIdentity) -> None:
        """The process takes the run from an owner that has died."""
        self._history.add("take_over", self._clock(), host=dead.host, pid=dead.pid)

    def deleted(self, name: str) -> None:
        """A step directory is not there under this name any more."""
        self._history.add("delete", self._clock(), name=name)

    def started(self, step: int | None = None) -> None:
        """The process owns the run; `step`: that it has restored before."""
        self._began_at = self._monotonic()
        self._noted = self._began_at, None
        self._note("start", {"step": step, "tends": self.tends or None, **run_facts()})

    def resumed(self, step: int, resume_s: float, progress: ReadProgress | None = None) -> None:
        """The loop has its state, that of this step, so many seconds after it has begun to look for it.

        `progress` is called with 0 while the disk is waited for; what it raises ends the wait.
        """
        if self._began_at is not None:
            self.completed = step
            self._noted = self._monotonic(), step
            is_first = next(_resumes) == 0  # what came before belongs to the loop that came first
            age_s = process_age_s() if is_first else None
            self._note("resumed", {"step": step, "resume_s": resume_s, "process_age_s": age_s}, progress)

    def _note(self, event: str, fields: Mapping[str, Any], progress: ReadProgress | None = None) -> None:
        """Note it on another thread: the disk may not answer, and the loop goes on then."""
        add = functools.partial(self._history.add, event, self._clock(), **fields)
        call_within(add, NOTE_S, progress or (lambda done: None))

    def beat(self) -> None:
        """Note how far the loop has come, if it has got further and the last note is old. Called every few seconds."""
        now, (at, step) = self._monotonic(), self._noted
        began_at, completed = self._began_at, self.completed  # other threads change them
        if began_at is None or completed in (None, step):
            return
        if now - at >= max(LEAST_S, min(MOST_S, SHARE * (now - began_at))):
            self._noted = now, completed
            self._history.add("progress", self._clock(), step=completed)

    def ended(self) -> None:
        """The process lets go of the run."""
        if self._began_at is not None:
            self._began_at = None
            self._history.add("end", self._clock(), how=self.ends_as, step=self.completed)
