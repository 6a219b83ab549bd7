"""What the events of a run measure: counters, gauges and histograms, by the names that all systems of metrics share."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

SECONDS, BYTES, BYTES_PER_S, PLAIN = "s", "By", "By/s", ""  # as UCUM writes them
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper ends of the histograms: from a call that only takes views to a save that is about to be given up."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """One thing that is measured.

    Attributes:
        name: words with dots between them, without the unit: "save.blocked".
        kind: a counter only grows; a gauge is the last value; a histogram counts values by their size.
        unit: one of `SECONDS`, `BYTES`, `BYTES_PER_S`, `PLAIN`.
        about: what it says, for people.
        label: what tells its series apart; None: there is one.
        series: the values of the label that are known beforehand.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    about: str
    label: str | None = None
    series: tuple[str, ...] = ()


class Sample(NamedTuple):
    """A value that an event has, and of which series."""

    measure: Measure
    value: float
    series: str | None = None


def _histogram(name: str, about: str) -> Measure:
    return Measure(name, "histogram", SECONDS, about)


_WITHOUT_FIGURES = ("delete", "preempted", "set_aside", "take_over")
EVENTS = Measure(
    "events",
    "counter",
    PLAIN,
    "Events of the run, as its history has them",
    "event",
    ("restore", "save", *_WITHOUT_FIGURES),
)
SAVES = Measure("saves", "counter", PLAIN, "Saves that have ended", "outcome", ("committed", "failed"))
RESTORES = Measure("restores", "counter", PLAIN, "Restores")
SKIPPED = Measure("restore.skipped_steps", "counter", PLAIN, "Steps that restores had to fall back past")
SAVE_TIME = Measure("last_save.timestamp", "gauge", SECONDS, "When the last save was committed, since 1970")
RESTORE_TIME = Measure("last_restore.timestamp", "gauge", SECONDS, "When the last restore ended, since 1970")
_OF_ALL_SAVES = {
    "blocked_s": _histogram("save.blocked", "How long a save held up the loop"),
    "wait_s": _histogram("save.wait", "Of that, how long it waited for the save before"),
    "snapshot_s": _histogram("save.snapshot", "Of that, how long the state was being taken"),
    "device_wait_s": _histogram("save.device_wait", "How long it waited for queued updates; not blocked"),
}
_OF_COMMITTED = {
    "save_s": _histogram("save.duration", "From the call that saves to the commit, with its wait for devices"),
    "write_s": _histogram("save.write", "Of that, how long data was written"),
    "commit_s": _histogram("save.commit", "Of that, how long it took to sync and publish it"),
    "bytes": Measure("saved", "counter", BYTES, "Data of committed saves"),
}
_LAST_SAVE = {
    "step": Measure("last_saved_step", "gauge", PLAIN, "The step that was committed last"),
    "bytes": Measure("last_save.size", "gauge", BYTES, "Data of the last committed save"),
    "bytes_per_s": Measure("last_save.rate", "gauge", BYTES_PER_S, "How fast it was written and committed"),
}
_OF_RESTORES = {
    "restore_s": _histogram("restore.duration", "How long a restore took"),
    "bytes": Measure("restored", "counter", BYTES, "Data that restores have read"),
}
_LAST_RESTORE = {
    "step": Measure("last_restored_step", "gauge", PLAIN, "The step that was restored last"),
    "bytes_per_s": Measure("last_restore.rate", "gauge", BYTES_PER_S, "How fast it was read"),
}
_UNITS = (("_bytes_per_s", BYTES_PER_S), ("_bytes", BYTES), ("_s", SECONDS))
# A counter of which nothing is known yet is 0; of a gauge nothing is known before its first value.
KNOWN = (EVENTS, SAVES, RESTORES, SKIPPED, *_OF_ALL_SAVES.values(), *_OF_COMMITTED.values(), *_OF_RESTORES.values())


def figures(event: Mapping[str, Any]) -> dict[str, float]:
    """The fields of an event that are finite numbers and measure something; true and false count as 1 and 0."""
    fields = {name: value for name, value in event.items() if name != "pid" and not name.endswith("_id")}
    numbers = {name: float(value) for name, value in fields.items() if isinstance(value, bool | int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def samples(event: Mapping[str, Any]) -> Iterator[Sample]:
    """What an event measures."""
    kind, numbers = str(event["event"]), figures(event)
    yield Sample(EVENTS, 1, kind)
    if kind == "save":
        yield Sample(SAVES, 1, "committed" if numbers.get("ok") else "failed")
        yield from _named(_OF_ALL_SAVES, numbers)
        if numbers.get("ok"):
            yield from _named(_OF_COMMITTED, numbers)
            yield from _named(_LAST_SAVE, numbers)
            yield Sample(SAVE_TIME, moment_s(event))
    elif kind == "restore":
        yield Sample(RESTORES, 1)
        yield Sample(SKIPPED, len(event.get("skipped", ())))
        yield from _named(_OF_RESTORES, numbers)
        yield from _named(_LAST_RESTORE, numbers)
        yield Sample(RESTORE_TIME, moment_s(event))
    elif kind not in _WITHOUT_FIGURES:
        for field, value in numbers.items():
            yield Sample(_gauge_of(kind, field), value)


def _named(measures: Mapping[str, Measure], numbers: Mapping[str, float]) -> Iterator[Sample]:
    return (Sample(measure, numbers[field]) for field, measure in measures.items() if field in numbers)


def _gauge_of(kind: str, field: str) -> Measure:
    """Of a field that nothing else is known of; its unit is at the end of its name."""
    stem, unit = next(((field.removesuffix(end), unit) for end, unit in _UNITS if field.endswith(end)), (field, PLAIN))
    name = ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in (kind, stem))
    return Measure(name, "gauge", unit, f"{field} of the last event {kind!r}")


def moment_s(event: Mapping[str, Any]) -> float:
    """When an event was noted, in seconds since 1970."""
    return datetime.datetime.fromisoformat(event["time"]).timestamp()
