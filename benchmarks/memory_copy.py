"""The subject `memcpy`: a copy of every array into memory that is there already, as a save and as a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import huge_memory, page_cache
from benchmarks.process_figures import ResidentMeter, release_memory
from benchmarks.random_bytes import each_leaf
from benchmarks.sample import LoadSample, Moment, Resident, SaveSample
from benchmarks.workloads import Workload

NAME = "memcpy"


class MemcpyTurns:
    """numpy's copy, one thread, one call for each leaf. It stores nothing: a mark of what memory allows."""

    packages = ("numpy",)

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        del path
        start, end, resident = self._copy(seed, None)
        return SaveSample(
            blocking_s=None,
            finished_s=end.wall_s - start.wall_s,
            durable_s=end.wall_s - start.wall_s,
            blocking_cpu_s=None,
            finished_cpu_s=end.cpu_s - start.cpu_s,
            durable_cpu_s=end.cpu_s - start.cpu_s,
            resident=resident,
            stored_bytes=0,
            stored_files=0,
        )

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        del path
        start, end, resident = self._copy(seed, target)
        sample = LoadSample(
            target=target,
            row=NAME,
            load_s=end.wall_s - start.wall_s,
            lazy_s=0.0,
            load_cpu_s=end.cpu_s - start.cpu_s,
            resident=resident,
            asked_bytes=sum(leaf.nbytes for leaf in self._workload.wanted(target)),
            disk_bytes=0,
        )
        return [sample]

    def close(self) -> None:
        """Nothing is kept."""

    def _copy(self, seed: Sequence[int], target: str | None) -> tuple[Moment, Moment, Resident]:
        leaves = [content.copy() for _, content in each_leaf(self._workload, seed, target)]
        destination = huge_memory.touched(sum(leaf.size for leaf in leaves))
        page_cache.settle()
        meter, start, offset = ResidentMeter(), Moment.now(), 0
        for leaf in leaves:
            np.copyto(destination[offset : offset + leaf.size], leaf)
            offset += leaf.size
        end, resident = Moment.now(), meter.read()
        if not np.array_equal(destination[: leaves[0].size], leaves[0]):
            raise ValueError("the copy differs")
        del leaves, destination
        release_memory()
        return start, end, resident
