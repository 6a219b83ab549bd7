"""What a whole save of a job asks of the storage and of the key-value store: threads are its processes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.counted_values import Asked, CountedValues
from jaxckpt_train.checkpointables.saving import CheckpointSave
from jaxckpt_train.checkpointables.staging import StagedPart
from jaxckpt_train.distributed.coordinator import ManyProcesses
from jaxckpt_train.pytree.leaves import ArrayLeaf, TreeRecord
from jaxckpt_train.pytree.snapshot import Snapshot
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Entry, Sink
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.segment import ArraySource, ChunkSource
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.transaction import Transaction
from tests.support.memory_backend import MemoryBackend

FINAL = "/runs/state"
SETTINGS = StoreSettings(io_threads=1, staging_bytes=1 << 20)


class CountedBackend:
    """A back end in memory that many processes share, as one of them sees it.

    Attributes:
        operations: how often this process asked for each; "synced" is a file whose data is synced.
        listed: how many entries it was shown.
    """

    def __init__(self, inner: MemoryBackend) -> None:
        self._inner, self.operations, self.listed = inner, Counter[str](), 0

    def create(self, path: str, *, direct: Any) -> Sink:
        """As the contract says."""
        self.operations["create"] += 1
        return _CountedSink(self._inner.create(path, direct=direct), self.operations)

    def list(self, path: str) -> list[Entry]:
        """As the contract says."""
        self.operations["list"] += 1
        found = self._inner.list(path)
        self.listed += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("open", "make_directory", "remove", "sync", "rename", "exchange"):
            self.operations[name] += 1
        return found


class _CountedSink:
    in_order = False

    def __init__(self, inner: Sink, operations: Counter[str]) -> None:
        self._inner, self._operations, self.alignment = inner, operations, inner.alignment

    def write_at(self, offset: int, data: np.ndarray) -> None:
        self._inner.write_at(offset, data)

    def finish(self, size: int, *, sync: bool) -> None:
        self._operations["synced"] += sync
        self._inner.finish(size, sync=sync)

    def abandon(self) -> None:
        self._inner.abandon()


@dataclasses.dataclass(frozen=True)
class SavedTogether:
    """What came of one save: what each process has asked for, and the checkpoint."""

    storage: Sequence[Counter[str]]
    listed: Sequence[int]
    values: Sequence[Asked]
    committed: Committed


def save_together(processes: int, arrays: int, timeout_s: float = 300.0) -> SavedTogether:
    """One save in which each process writes one row of each array; it is opened again before this returns."""
    inner, values = MemoryBackend(), CountedValues(waits=True)
    inner.make_directory("/runs", parents=True, sync=False)
    backends: list[Any] = [CountedBackend(inner) for _ in range(processes)]
    views = [values.of(process) for process in range(processes)]

    def work(process: int) -> None:
        job = ManyProcesses(views[process], process, processes, timeout_s)
        _save(job, backends[process], arrays, timeout_s)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(work, range(processes)))
    committed = open_committed(inner, FINAL)
    listed = [backend.listed for backend in backends]
    return SavedTogether([each.operations for each in backends], listed, [view.asked for view in views], committed)


@dataclasses.dataclass(frozen=True)
class _Target:
    """A new checkpoint without information."""

    backend: Backend
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replace: bool = False

    def create_attempt(self) -> Transaction:
        """Create the attempt."""
        return Transaction(self.backend, FINAL, SETTINGS)

    def writes_everything(self) -> bool:
        """There is no checkpoint before."""
        return True

    def after_commit(self, committed: Committed) -> None:
        """Record nothing."""


def _save(job: ManyProcesses, backend: Backend, arrays: int, timeout_s: float) -> Committed:
    save = CheckpointSave(job.within("save", timeout_s), FINAL, backend, SETTINGS)
    save.parts = [StagedPart("state", "pytree", snapshot=_rows(job.process, job.processes, arrays))]
    return save.write_and_commit(_Target(backend))


def _rows(process: int, processes: int, arrays: int) -> Snapshot:
    """One row of each array, as if the others were on the devices of other processes."""
    box, row = ((process, process + 1), (0, 2)), np.full((1, 2), process, np.int32)
    names = [f"layer_{number:05d}" for number in range(arrays)]
    sources = [ArraySource(name, (processes, 2), row.dtype, (ChunkSource(box, row),)) for name in names]
    is_taken = Latch()
    is_taken.open()
    return Snapshot(TreeRecord({}, dict.fromkeys(names, ArrayLeaf())), sources, None, is_taken, None, None)
