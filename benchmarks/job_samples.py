"""Samples of a job: what the processes of one save or load measured, as one sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.sample import LoadSample, Notes, Resident, SaveSample

Samples = Sequence[SaveSample] | Sequence[LoadSample]


def save_of_job(samples: Sequence[SaveSample]) -> SaveSample:
    """Wall times from the first that began to the last that ended; processor time and memory of all together.

    Args:
        samples: one of each process, that of the leading one first.
    """
    first = samples[0]
    return SaveSample(
        blocking_s=_wall_s(samples, [sample.blocking_s for sample in samples]),
        finished_s=_wall_s(samples, [sample.finished_s for sample in samples]),
        durable_s=_wall_s(samples, [sample.durable_s for sample in samples]),
        blocking_cpu_s=_sum(sample.blocking_cpu_s for sample in samples),
        finished_cpu_s=_sum(sample.finished_cpu_s for sample in samples),
        durable_cpu_s=_sum(sample.durable_cpu_s for sample in samples),
        resident=_resident(samples),
        stored_bytes=first.stored_bytes,
        stored_files=first.stored_files,
        began_s=min(sample.began_s for sample in samples),
        written_bytes=tuple(nbytes for sample in samples for nbytes in sample.written_bytes),
        notes=_notes(samples),
    )


def load_of_job(samples: Sequence[LoadSample]) -> LoadSample:
    """The same of a load; what was read is the sum of all, what was asked for is counted once."""
    first = samples[0]
    return LoadSample(
        target=first.target,
        row=first.row,
        load_s=_wall_s(samples, [sample.load_s for sample in samples]),
        lazy_s=max(sample.lazy_s for sample in samples),
        load_cpu_s=sum(sample.load_cpu_s for sample in samples),
        resident=_resident(samples),
        asked_bytes=first.asked_bytes,
        disk_bytes=sum(sample.disk_bytes for sample in samples),
        read_bytes=_sum(sample.read_bytes for sample in samples),
        began_s=min(sample.began_s for sample in samples),
        notes=_notes(samples),
    )


def _wall_s(samples: Samples, took_s: Sequence[float | None]) -> float | None:
    """None where one of them has no such time."""
    if None in took_s:
        return None
    ends = [sample.began_s + took for sample, took in zip(samples, took_s, strict=True)]
    return max(ends) - min(sample.began_s for sample in samples)


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(found)


def _resident(samples: Samples) -> Resident:
    """The sum of the peaks is at least the peak of the sum."""
    each = [sample.resident for sample in samples]
    return Resident(
        before=sum(one.before for one in each), peak=sum(one.peak for one in each), final=sum(one.final for one in each)
    )


def _notes(samples: Samples) -> Notes:
    """Those of the leading process; the machine is the same for all, a mapped file concerns all."""
    notes = dict(samples[0].notes)
    notes["stolen_s"] = max(float(sample.notes.get("stolen_s", 0.0)) for sample in samples)
    if any("was_mapped" in sample.notes for sample in samples):
        notes["was_mapped"] = any(bool(sample.notes.get("was_mapped")) for sample in samples)
    return notes
