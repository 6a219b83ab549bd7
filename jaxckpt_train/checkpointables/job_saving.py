"""Save checkpointables of a multi-process job: each process writes its shards, and the primary process commits."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxckpt_train.checkpointables.saving import (
    ContentComparison,
    SaveTimes,
    StagedPart,
    check_finite,
    close_parts,
    make_tracker,
    refuse_differences,
    stage_all,
    undo_on_error,
    value_file,
    wait_for_devices,
)
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CheckpointError, OtherProcessError, StorageError
from jaxckpt_train.pending import ProgressTracker
from jaxckpt_train.pytree.leaves import encode_tree
from jaxckpt_train.pytree.partition import JobPartition
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import BLOCK_BYTES, FORMAT, FORMAT_VERSION, FileRecord, Manifest, PartRecord
from jaxckpt_train.store.process_index import PartIndex, ProcessIndex, decode_index, encode_index, merge_indexes
from jaxckpt_train.store.transaction import Attempt, Transaction
from jaxckpt_train.store.writer import WrittenArrays, write_arrays

_DIFFERS = b"differs"


class _Coming(msgspec.Struct):
    """The summary of a process's next save. `owners` maps arrays to the process whose devices hold them completely."""

    subject: str
    own_values: dict[str, str]
    owners: dict[str, int]


class _Begun(msgspec.Struct):
    """The attempt.

    `shared` names the checkpointables with equal own values; `owners` combines those of all processes.
    """

    directory: bytes
    final: bytes
    info: dict[str, Any]
    shared: tuple[str, ...]
    owners: dict[str, int]


class _Done(msgspec.Struct):
    """The primary's message about the committed checkpoint."""

    sha256: str
    bytes: int
    more: Any


@dataclasses.dataclass
class JobSave:
    """One save of a job, as one of its processes runs it: `stage` on the loop's thread, `run` on any thread.

    Attributes:
        job: the coordinator for this save only; all processes create one for the same save.
        subject: the name of what is saved, for messages; the same in all processes.
        begin: creates the attempt in the primary process.
        backend: the storage.
        info: the information for the manifest. The primary's is used.
        settings: how checkpoints are stored.
        replace: whether an existing checkpoint is replaced.
        committed: called in the primary after the commit, before the other processes learn of it. Its result is plain
            data that all processes receive. An error that it raises is raised in all of them, and the checkpoint stays.
        result: the result of `committed`.
        times: the durations of the phases in this process.
        parts: the staged checkpointables of this process.
        tracker: measures the progress of this process.
    """

    job: Coordinator
    subject: str
    begin: Callable[[], Transaction]
    backend: Backend
    info: Mapping[str, Any]
    settings: StoreSettings
    replace: bool
    committed: Callable[[Committed], Any] = lambda committed: None
    result: Any = None
    times: SaveTimes = dataclasses.field(default_factory=SaveTimes)
    parts: Sequence[StagedPart] = ()
    tracker: ProgressTracker = dataclasses.field(default_factory=ProgressTracker)

    def stage(self, checkpointables: Mapping[str, Any]) -> None:
        """Stage all checkpointables as they are now, like `stage_all`."""
        partition = JobPartition(self.job.process, self.job.processes)
        self.parts = stage_all(checkpointables, self.times, self.settings, partition)
        self.tracker = make_tracker(self.parts)

    def run(self) -> Committed:
        """Write this process's shards and take part in the commit.

        Raises:
            Any error in this process, or the error of another process; nothing is committed then.
            CheckpointTimeoutError: another process did not join or made no progress.
        """
        try:
            return self._run()
        finally:
            close_parts(self.parts)
            self.job.end()

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Raise an error of the context in the other processes as well. Use it before `run`."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        def give() -> bytes:
            raise error

        try:
            with contextlib.suppress(type(error)):
                self.job.exchange(self._beginning, give)
        finally:
            close_parts(self.parts)
            self.job.end()

    @property
    def _beginning(self) -> str:
        return f"beginning to save {self.subject}"

    def _run(self) -> Committed:
        made: list[Transaction] = []
        sign = self.tracker.sign
        answer = self.job.exchange(self._beginning, self._coming, lambda values: self._begin(values, made), sign)
        begun = msgspec.msgpack.decode(answer, type=_Begun)
        transaction = made[0] if made else None
        self._own(begun.owners)
        with undo_on_error(transaction, self.parts):
            written = _Written(self, begun, transaction)
            # While this process waits, the progress of the others counts as progress of this save.
            done = self.job.exchange(f"saving {self.subject}", written.write, written.merge, sign, self._others_moved)
            if done == _DIFFERS:
                doing = f"comparing what the processes save as {self.subject}"
                self.job.exchange(doing, written.comparison.encoded, refuse_differences, sign)
        if written.committed is not None:
            return written.committed
        message = msgspec.msgpack.decode(done, type=_Done)
        self.result = message.more
        manifest = self.manifest(begun.info, (), written.records)
        return Committed(os.fsdecode(begun.final), manifest, message.sha256, message.bytes)

    def _own(self, owners: Mapping[str, int]) -> None:
        for part in self.parts if owners else ():
            snapshot = part.snapshot
            for number in list(snapshot.local) if snapshot is not None else ():
                assert snapshot is not None
                if owners.get(f"{part.name}/{snapshot.arrays[number].name}") == self.job.process:
                    snapshot.own(number)

    def _others_moved(self) -> None:
        self.tracker(0)

    def _coming(self) -> bytes:
        own_values = ContentComparison(self.settings.digest).of_own_values(self.parts)
        owners = {
            f"{part.name}/{part.snapshot.arrays[number].name}": process
            for part in self.parts
            if part.snapshot is not None
            for number, process in part.snapshot.owners.items()
        }
        return msgspec.msgpack.encode(_Coming(self.subject, own_values, owners))

    def _begin(self, values: Sequence[bytes], made: list[Transaction]) -> bytes:
        """Create the attempt if all processes save the same."""
        coming = [msgspec.msgpack.decode(value, type=_Coming) for value in values]
        for process, each in enumerate(coming):
            if each.subject != self.subject:
                raise OtherProcessError(
                    f"process {process} saves {each.subject}, but process 0 saves {self.subject}; all processes "
                    "of a job must save the same steps in the same order"
                )
        own = coming[0].own_values
        shared = tuple(name for name in own if all(each.own_values.get(name) == own[name] for each in coming))
        transaction = self.begin()
        made.append(transaction)
        with undo_on_error(transaction, self.parts):
            for part in self.parts:
                transaction.add_folder(part.name)
            paths = os.fsencode(transaction.directory), os.fsencode(transaction.final)
            owners = {name: owner for each in coming for name, owner in each.owners.items()}
            return msgspec.msgpack.encode(_Begun(*paths, dict(self.info), shared, owners))

    def manifest(self, info: Mapping[str, Any], segments: Sequence[Any], parts: Sequence[PartRecord]) -> Manifest:
        """Return the manifest of the checkpoint."""
        digest = self.settings.digest
        return Manifest(FORMAT, FORMAT_VERSION, digest, BLOCK_BYTES, tuple(segments), tuple(parts), dict(info))


class _Written:
    """The part of an attempt that a process writes.

    Attributes:
        records: the records of all parts, without chunks.
        comparison: the content that must be the same in all processes.
        committed: in the primary, the committed checkpoint.
    """

    def __init__(self, save: JobSave, begun: _Begun, transaction: Transaction | None) -> None:
        self._save, self._transaction = save, transaction
        self._directory, self._info = os.fsdecode(begun.directory), begun.info
        self._shared = frozenset(begun.shared)
        self.records: list[PartRecord] = []
        self.comparison = ContentComparison(save.settings.digest)
        self.committed: Committed | None = None

    def write(self) -> bytes:
        """Write the shards of all parts, and return their encoded index."""
        save = self._save
        self._refuse_unseen()
        wait_for_devices(save.parts, save.times)
        check_finite(save.subject, save.parts, save.settings)
        started = time.perf_counter()
        indexes = tuple(self._write_part(part) for part in save.parts)
        save.times.write_s = time.perf_counter() - started
        return encode_index(ProcessIndex(self.comparison.digest(), indexes))

    def _refuse_unseen(self) -> None:
        """Raise CheckpointError if this process does not see the directory that the primary has created."""
        try:
            self._save.backend.list(self._directory)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CheckpointError(
                f"{self._directory}: process 0 created this directory, but process {self._save.job.process} does not "
                "see it; all processes of a job must save to one directory on shared storage"
            ) from error

    def _write_part(self, part: StagedPart) -> PartIndex:
        self.comparison.add_part(part)
        self._progress(0)
        if part.snapshot is None:
            self.records.append(PartRecord(part.name, part.kind, (), (), msgspec.Raw(b"null")))
            if part.own_files is not None:
                part.own_files.write(Path(self._directory, part.name))
            return PartIndex((), (), (), self._own_value(part))
        written = self._write_arrays(part)
        self.comparison.add_local(part, written)
        arrays = tuple(msgspec.structs.replace(array, chunks=()) for array in written.arrays)
        self.records.append(PartRecord(part.name, part.kind, arrays, (), encode_tree(part.snapshot.record)))
        numbers = tuple(number for number, array in enumerate(written.arrays) if array.chunks)
        return PartIndex(written.segments, numbers, tuple(written.arrays[number].chunks for number in numbers))

    def _own_value(self, part: StagedPart) -> tuple[FileRecord, ...]:
        """Write this process's value of a part to its own file, unless all processes have the same value."""
        if part.value is None or part.same is None or part.name in self._shared:
            return ()
        save = self._save
        attempt = self._transaction or Attempt(save.backend, self._directory, save.settings)
        record = attempt.write_file(value_file(part.name, save.job.process), part.value)
        if attempt is not self._transaction:  # the transaction syncs when it commits
            attempt.sync()
        return (record,)

    def _write_arrays(self, part: StagedPart) -> WrittenArrays:
        assert part.snapshot is not None
        save = self._save
        written = write_arrays(
            save.backend,
            self._directory,
            part.name,
            part.snapshot.arrays,
            save.settings,
            first_segment=0,
            progress=self._progress,
            process=save.job.process,
        )
        save.times.bytes += written.data_bytes
        return written

    def _progress(self, done: int) -> None:
        self._save.tracker(done)
        if self._save.job.is_over():
            raise CheckpointError(f"saving {self._save.subject}: stopped, because another process failed")

    def merge(self, values: Sequence[bytes]) -> bytes:
        """Commit in the primary what all processes have written, unless they differ in what must be the same."""
        save, transaction = self._save, self._transaction
        assert transaction is not None
        indexes = [decode_index(value) for value in values]
        if any(index.alike != indexes[0].alike for index in indexes):
            return _DIFFERS
        segments, parts = merge_indexes(self.records, indexes)
        started = time.perf_counter()
        for number, part in enumerate(save.parts):
            self._progress(0)
            if part.own_files is not None:
                files = transaction.adopt_folder(part.name, self._progress)
                parts[number] = msgspec.structs.replace(parts[number], files=files)
            elif part.value is not None and (part.same is None or part.name in self._shared):
                file = transaction.write_file(value_file(part.name), part.value)
                parts[number] = msgspec.structs.replace(parts[number], files=(file,))
        committed = transaction.commit(save.manifest(self._info, segments, parts), replace=save.replace)
        save.times.commit_s = time.perf_counter() - started
        self.committed = committed
        save.result = save.committed(committed)
        return msgspec.msgpack.encode(_Done(committed.manifest_sha256, committed.data_bytes, save.result))
