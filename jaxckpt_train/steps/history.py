"""The history: one JSON line for every save, restore, deletion and preemption of a run."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.sinks.feed import Feeds, Sink
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.per_process import free_in_child
from jaxckpt_train.store.plain_files import read_blocks, read_end, read_ends
from jaxckpt_train.value_checks import shown

HISTORY_NAME = "history.jsonl"
MOST_BYTES = 1 << 30
"""More than two million events take; of a larger file both ends are read."""
MOST_LISTED_BYTES = 256 << 20  # where all events are in memory at once
BLOCK_BYTES = 4 << 20
MOST_LINE_BYTES = 16 << 20  # what is longer is no event, and is not put together
RECENT_BYTES = 8 << 20
MOST_TOLD = 5
T = TypeVar("T")
_log = logging.getLogger("jaxckpt_train")


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
                if error is not None and left_out <= MOST_TOLD:
                    _log.warning("%s: line %d is left out: %s", path, number, error)
        if left_out > MOST_TOLD:
            _log.warning("%s: and %d more lines are left out", path, left_out - MOST_TOLD)
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
