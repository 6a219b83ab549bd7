"""Samples: what one save and one load took, in seconds of wall time and of processor time, and in memory."""

from __future__ import annotations

import dataclasses
import time

Notes = dict[str, float | str | bool]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in time, of the wall clock and of this process's processor time (all threads, user and system)."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
    """Resident memory of the process over a save or a load, in bytes.

    Attributes:
        before: when it began.
        peak: the most at any moment of it.
        final: when it was over, with what it returned still alive.
    """

    before: int
    peak: int
    final: int

    @property
    def extra_peak(self) -> int:
        """The most that was resident beyond what was before."""
        return self.peak - self.before

    @property
    def left(self) -> int:
        """What was resident at the end beyond what was before."""
        return self.final - self.before


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSample:
    """One save.

    Attributes:
        blocking_s: until the call of the asynchronous save came back; None where there is no such thing.
        finished_s: until the subject itself said that the save is finished ("plain").
        durable_s: until the files and directories of the checkpoint are synced, by the subject or by us.
        blocking_cpu_s, finished_cpu_s, durable_cpu_s: processor time of the same intervals.
        resident: memory until durable; the saved tree is in `before`.
        stored_bytes: size of the checkpoint's files.
        stored_files: how many they are.
        began_s: when, by a clock that all processes of a machine share.
        written_bytes: for each process of a job, what it made the kernel write; empty: not known.
        notes: what else belongs to the sample.
    """

    blocking_s: float | None
    finished_s: float
    durable_s: float
    blocking_cpu_s: float | None
    finished_cpu_s: float
    durable_cpu_s: float
    resident: Resident
    stored_bytes: int
    stored_files: int
    began_s: float = 0.0
    written_bytes: tuple[int, ...] = ()
    notes: Notes = dataclasses.field(default_factory=dict)

    @property
    def extra_peak_bytes(self) -> int:
        """Memory that the save took at its peak, beyond the tree."""
        return self.resident.extra_peak

    @classmethod
    def from_json(cls, fields: dict[str, object]) -> SaveSample:
        """What `dataclasses.asdict` and JSON made of one."""
        written = tuple(fields.get("written_bytes", ()))
        return cls(**{**fields, "resident": Resident(**fields["resident"]), "written_bytes": written})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSample:
    """One load, with cold caches.

    Attributes:
        target: what was loaded onto, see `Workload.targets`.
        row: the subject's name; another name where one subject measures two ways to read.
        load_s: until every array is ready on its device; if the first touch of their pages still read from the disk,
            until all pages were touched.
        lazy_s: the part of `load_s` that such a first touch took; 0 if nothing was left for later.
        load_cpu_s: processor time of the load.
        resident: memory over the load; what was loaded is in `final`.
        asked_bytes: bytes of the arrays that were asked for.
        disk_bytes: bytes that the process made the kernel fetch from the disk, until every page was touched.
        read_bytes: bytes that its read calls gave it, whether they came from the disk or from the page cache, which on
            machines of their own other processes would not have filled; None: not known.
        began_s: when, by a clock that all processes of a machine share.
        notes: what else belongs to the sample.
    """

    target: str
    row: str
    load_s: float
    lazy_s: float
    load_cpu_s: float
    resident: Resident
    asked_bytes: int
    disk_bytes: int
    read_bytes: int | None = None
    began_s: float = 0.0
    notes: Notes = dataclasses.field(default_factory=dict)

    @property
    def extra_peak_bytes(self) -> int:
        """Memory that the load took at its peak; at least that of the arrays it returned."""
        return self.resident.extra_peak

    @classmethod
    def from_json(cls, fields: dict[str, object]) -> LoadSample:
        """What `dataclasses.asdict` and JSON made of one."""
        return cls(**{**fields, "resident": Resident(**fields["resident"])})
