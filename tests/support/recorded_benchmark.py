"""A recorded run with plain numbers, for the tests of summaries and reports."""

from __future__ import annotations

from benchmarks.record import Record, Turn, WorkloadRecord
from benchmarks.sample import LoadSample, Resident, SaveSample

RESIDENT = Resident(before=100, peak=350, final=300)
MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_bytes": 24 << 30,
    "kernel": "6.1",
    "load_average_1min": 0.1,
    "file_system": "ext4",
    "device": "/dev/vda",
    "mount_point": "/",
    "mount_options": "rw",
}
WITH_VERSIONS = {**MACHINE, "commit": "1", "python": "3", "jax": "0.10", "numpy": "2", "orbax-checkpoint": "0.12"}


def save_sample(durable_s: float, *, plain_s: float | None = None, blocking_s: float | None = None) -> SaveSample:
    return SaveSample(
        blocking_s=blocking_s,
        finished_s=durable_s if plain_s is None else plain_s,
        durable_s=durable_s,
        blocking_cpu_s=blocking_s,
        finished_cpu_s=durable_s,
        durable_cpu_s=durable_s,
        resident=RESIDENT,
        stored_bytes=1000,
        stored_files=3,
    )


def load_sample(
    row: str, load_s: float, *, target: str = "whole", lazy_s: float = 0.0, **notes: bool | float
) -> LoadSample:
    return LoadSample(
        target=target,
        row=row,
        load_s=load_s,
        lazy_s=lazy_s,
        load_cpu_s=load_s,
        resident=RESIDENT,
        asked_bytes=1000,
        disk_bytes=1200,
        notes={"caches": "drop_caches"} | notes,
    )


def turns() -> list[Turn]:
    """Return a warm-up, and three rounds in which the peer takes 2, 4 and 3 times as long as ours."""
    made = [Turn(0, "ours", save_sample(99.0), [load_sample("ours", 99.0)])]
    for number, factor in enumerate((2.0, 4.0, 3.0), start=1):
        loads = [load_sample("raw", 0.5 * number), load_sample("raw_fresh", 0.75 * number)]
        made += [
            Turn(number, "raw", save_sample(0.25 * number), loads),
            Turn(number, "ours", save_sample(1.0 * number, blocking_s=0.1), [load_sample("ours", 1.0 * number)]),
            Turn(
                number,
                "peer",
                save_sample(factor * number, plain_s=0.5 * number),
                [load_sample("peer", 10 * factor * number)],
            ),
        ]
    return made


def workload_record(name: str = "dense") -> WorkloadRecord:
    return WorkloadRecord(
        name=name,
        nbytes=1000,
        leaves=4,
        targets=("whole",),
        counted_rounds=3,
        seed=7,
        quick=False,
        fresh_loads=False,
        command=f"python -m benchmarks.run --only {name}",
        load_average=0.2,
        versions={"python": "3.11", "jax": "0.10.2"},
        left_out={"torch_save": "no PyTorch environment"},
        failed={},
        turns=turns(),
    )


def record(*names: str) -> Record:
    return Record(dict(MACHINE), {name: workload_record(name) for name in names})
