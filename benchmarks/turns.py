"""Turns: the commands of a worker for one subject and one workload, and how a checkpoint library executes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks import host_memory, page_cache
from benchmarks.arrays import arrays_for, check, touch
from benchmarks.company import Company, SingleProcess
from benchmarks.process_figures import (
    ResidentMeter,
    asked_read_bytes,
    disk_read_bytes,
    disk_written_bytes,
    is_mapped,
    release_memory,
    stolen_s,
)
from benchmarks.sample import LoadSample, Moment, SaveSample
from benchmarks.subject import Subject
from benchmarks.workloads import SAVED, Workload


class Turns(Protocol):
    """One subject with one workload. Between calls nothing of a tree stays in memory.

    Attributes:
        packages: the distributions whose versions belong to its figures.
    """

    packages: tuple[str, ...]

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        """Make the tree of this seed, save it to the new directory `path`, free it."""

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        """Drop the caches, load what `save` left at `path`, compare it with the seed byte for byte, free it.

        Raises:
            ValueError: it is not what was saved.
        """

    def close(self) -> None:
        """Free everything."""


class CheckpointerTurns:
    """The turns of a checkpoint library, in a process alone or in each one of a job."""

    def __init__(self, name: str, subject: Subject, workload: Workload, company: Company | None = None) -> None:
        self._name, self._subject, self._workload = name, subject, workload
        self._company = company or SingleProcess()
        self._saves = 0
        self._arrays = arrays_for(subject.arrays)
        self.packages = subject.packages

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        self._saves += 1
        state = self._arrays.make(self._workload, seed)
        self._company.prepare(lambda: self._calm(SAVED))
        meter, stolen, written, start = ResidentMeter(), stolen_s(), disk_written_bytes(), Moment.now()
        wait = self._subject.start_save(path, state)
        returned = Moment.now() if wait else None
        if wait:
            wait()
        finished = Moment.now()
        if not self._subject.durable and self._company.is_primary:
            page_cache.sync_tree(path)
        durable, stolen = Moment.now(), stolen_s() - stolen
        resident, written = meter.read(), disk_written_bytes() - written
        files = page_cache.files_below(path)
        del state, wait
        release_memory()
        return SaveSample(
            blocking_s=returned.wall_s - start.wall_s if returned else None,
            finished_s=finished.wall_s - start.wall_s,
            durable_s=durable.wall_s - start.wall_s,
            blocking_cpu_s=returned.cpu_s - start.cpu_s if returned else None,
            finished_cpu_s=finished.cpu_s - start.cpu_s,
            durable_cpu_s=durable.cpu_s - start.cpu_s,
            resident=resident,
            stored_bytes=sum(file.stat().st_size for file in files),
            stored_files=len(files),
            began_s=start.wall_s,
            written_bytes=(written,),
            notes={"stolen_s": stolen},
        )

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        leaves = self._workload.wanted(target)
        like = self._arrays.like(self._workload, target)
        mapped = is_mapped(path)
        dropped = self._company.prepare(lambda: self._drop(path, target))
        meter, read_before, asked, stolen = ResidentMeter(), disk_read_bytes(), asked_read_bytes(), stolen_s()
        start = Moment.now()
        loaded = self._subject.load(path, like)
        self._arrays.wait(loaded)
        ready, read_until_ready, asked = Moment.now(), disk_read_bytes(), asked_read_bytes() - asked
        touch(self._arrays, loaded, leaves)
        touched, read_until_touched, stolen = Moment.now(), disk_read_bytes(), stolen_s() - stolen
        resident = meter.read()
        lazy = read_until_touched > read_until_ready
        end = touched if lazy else ready
        check(self._arrays, loaded, self._workload, seed, target)
        del loaded
        release_memory()
        sample = LoadSample(
            target=target,
            row=self._name,
            load_s=end.wall_s - start.wall_s,
            lazy_s=touched.wall_s - ready.wall_s if lazy else 0.0,
            load_cpu_s=end.cpu_s - start.cpu_s,
            resident=resident,
            asked_bytes=sum(leaf.nbytes for leaf in leaves),
            disk_bytes=read_until_touched - read_before,
            read_bytes=asked,
            began_s=start.wall_s,
            notes={"was_mapped": mapped, "stolen_s": stolen} | ({"caches": dropped} if dropped else {}),
        )
        return [sample]

    def close(self) -> None:
        self._subject.close()

    def _calm(self, target: str) -> None:
        page_cache.settle()
        self._make_present(target)

    def _drop(self, path: Path, target: str) -> page_cache.Dropped:
        dropped = page_cache.drop(path)
        self._make_present(target)
        return dropped

    def _make_present(self, target: str) -> None:
        """Not all of it in the first turn of a process, whose times do not count."""
        is_quick = self._workload.is_quick or self._saves == 1
        host_memory.make_present(self._workload.held_bytes(target), is_quick=is_quick)
