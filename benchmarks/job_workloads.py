"""Workloads of jobs: what several processes save and load together."""

from __future__ import annotations

from benchmarks.leaf import Axis, Leaf
from benchmarks.workloads import WHOLE, Workload

FEW, MORE, MANY = 2, 4, 8
ROWS = {processes: f"rows_{processes}" for processes in (FEW, MORE, MANY)}
REPLICATED_JOB = f"replicated_{MORE}"
COLUMNS = f"1x{MORE}"

QUICK_SHAPE, SHAPE = (1024, 1024), (4096, 4096)
QUICK_ARRAYS, ARRAYS = 4, 16


def job_workloads(quick: bool) -> dict[str, Workload]:
    """By name: rows of each array in each of 2, 4 and 8 processes (fully sharded data parallel), and all of it in each.

    Those of 4 processes are also loaded cut into columns, so that each process needs a part of what every one wrote.
    What is replicated are integers: Orbax's broadcast does not keep all bits of floats.
    """
    targets = {FEW: (WHOLE,), MORE: (WHOLE, COLUMNS), MANY: (WHOLE,)}
    rows = [
        Workload(ROWS[processes], _leaves("float32", ("x", "y"), quick), (processes, 1), each, quick, processes)
        for processes, each in targets.items()
    ]
    replicated = Workload(REPLICATED_JOB, _leaves("int32", (), quick), (MORE, 1), (WHOLE,), quick, MORE)
    return {workload.name: workload for workload in (*rows, replicated)}


def _leaves(dtype: str, spec: tuple[Axis, ...], quick: bool) -> tuple[Leaf, ...]:
    return tuple(
        Leaf((f"layer_{number // 4}", f"param_{number % 4}"), QUICK_SHAPE if quick else SHAPE, dtype, spec)
        for number in range(QUICK_ARRAYS if quick else ARRAYS)
    )
