"""Summary: medians, spreads and ratios of many samples."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.rounds import WARM_UP_ROUND, Turn
from benchmarks.sample import Sample

OURS = "ours"
LAZY_FRACTION = 0.1

MEASURES = {
    "blocking_s": "blocking",
    "finished_s": "save, plain",
    "durable_s": "save, durable",
    "load_s": "load",
    "durable_cpu_s": "CPU of save",
    "load_cpu_s": "CPU of load",
}
"""Field of a sample -> heading, for the table of seconds."""

RATIOS = {
    "blocking": ("blocking_s", "blocking_s"),
    "save, durable": ("durable_s", "durable_s"),
    "save, theirs plain": ("finished_s", "durable_s"),
    "load": ("load_s", "load_s"),
    "CPU of save": ("durable_cpu_s", "durable_cpu_s"),
    "CPU of load": ("load_cpu_s", "load_cpu_s"),
}
"""Heading -> the field of the other's sample, divided by this field of our sample of the same round."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """The middle and the ends of what the counted rounds gave."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one workload gave; None where a subject has no such measure.

    Attributes:
        seconds: subject -> field of a sample -> spread over the counted rounds.
        ratios: other subject -> heading -> spread of (their time / our time of the same round); empty without `ours`.
        warnings: what a reader of the figures has to know.
    """

    seconds: dict[str, dict[str, Spread | None]]
    ratios: dict[str, dict[str, Spread | None]]
    warnings: list[str]


def summarise(turns: Sequence[Turn]) -> Summary:
    """Medians and ratios over the counted rounds; the warm-up is left out."""
    by_subject: dict[str, dict[int, Sample]] = {}
    for turn in turns:
        if turn.round != WARM_UP_ROUND:
            by_subject.setdefault(turn.subject, {})[turn.round] = turn.sample
    seconds = {
        subject: {field: _spread([getattr(sample, field) for sample in samples.values()]) for field in MEASURES}
        for subject, samples in sorted(by_subject.items())
    }
    ours = by_subject.get(OURS, {})
    ratios = {
        subject: {heading: _ratio(samples, ours, *fields) for heading, fields in RATIOS.items()}
        for subject, samples in sorted(by_subject.items())
        if ours and subject != OURS
    }
    return Summary(seconds, ratios, _warnings(by_subject))


def _spread(values: Sequence[float | None]) -> Spread | None:
    present = [value for value in values if value is not None]
    return Spread.of(present) if present else None


def _ratio(theirs: dict[int, Sample], ours: dict[int, Sample], their_field: str, our_field: str) -> Spread | None:
    pairs = [(getattr(theirs[number], their_field), getattr(ours[number], our_field)) for number in ours]
    return _spread([their / our if their is not None and our else None for their, our in pairs])


def _warnings(by_subject: dict[str, dict[int, Sample]]) -> list[str]:
    warnings = []
    for subject, samples in sorted(by_subject.items()):
        if any(sample.notes["caches"] != "drop_caches" for sample in samples.values()):
            warnings.append(f"{subject}: no permission to drop caches; only its own files' pages were (fadvise)")
        if not all(sample.notes.get("direct_io", True) for sample in samples.values()):
            warnings.append(f"{subject}: the file system refused O_DIRECT; this is not the limit of the disk")
        lazy_s = statistics.median(sample.lazy_s for sample in samples.values())
        if lazy_s > LAZY_FRACTION * statistics.median(sample.load_s for sample in samples.values()):
            warnings.append(f"{subject}: {lazy_s:.3f} s of reading came only at first use, not in its load time")
    return warnings
