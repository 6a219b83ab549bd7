"""Sample: what one save followed by one load took, in seconds of wall time and of processor time."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in time, of the wall clock and of this process's processor time (all threads, user and system)."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One save and one load by one subject.

    Attributes:
        blocking_s: until the call of the asynchronous save came back; None where there is no such thing.
        finished_s: until the subject itself said that the save is finished ("plain").
        durable_s: until the files and directories of the checkpoint are synced, by the subject or by us.
        load_s: cold caches, until every array is ready on its device.
        lazy_s: how much longer the first touch of every page of the loaded arrays took than that of the saved ones;
            large only if the load left reading for later.
        blocking_cpu_s, finished_cpu_s, durable_cpu_s, load_cpu_s: processor time of the same intervals.
        stored_bytes: size of the checkpoint's files.
        stored_files: how many they are.
        notes: what else belongs to the sample.
    """

    blocking_s: float | None
    finished_s: float
    durable_s: float
    load_s: float
    lazy_s: float
    blocking_cpu_s: float | None
    finished_cpu_s: float
    durable_cpu_s: float
    load_cpu_s: float
    stored_bytes: int
    stored_files: int
    notes: dict[str, float | str | bool] = dataclasses.field(default_factory=dict)
