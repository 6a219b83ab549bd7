"""Save one checkpoint: every process of a job writes its shards, and the primary process commits.

`CheckpointSave` has four phases: `stage` on the caller's thread; then begin, write and commit in `write_and_commit`, on
any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.checkpointables.base import value_file
from jaxckpt_train.checkpointables.staging import (
    OwnFiles,
    SaveTimes,
    StagedPart,
    check_finite,
    close_parts,
    first_of,
    make_tracker,
    stage_all,
    wait_for_devices,
)
from jaxckpt_train.checkpointables.unchanged import UnchangedLeaves
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CheckpointError, MismatchError, OtherProcessError, StorageError
from jaxckpt_train.pending import PendingSave, ProgressTracker, start_save
from jaxckpt_train.pytree.colocated.transfer import write_on_hosts
from jaxckpt_train.pytree.leaves import encode_tree
from jaxckpt_train.pytree.partition import JobPartition
from jaxckpt_train.pytree.snapshot import Snapshot
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Entry, Opener
from jaxckpt_train.store.backends.local import temporary_folder
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.index_files import (
    SEED_BYTES,
    ArrayGroups,
    divided_index,
    encode_index_file,
    encode_tables,
    folder_of,
    index_name,
)
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    INDEXED_VERSION,
    FileRecord,
    IndexRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    block_digests,
    digest_function,
)
from jaxckpt_train.store.process_index import (
    IndexSummary,
    PartIndex,
    ProcessIndex,
    decode_index,
    encode_index,
    merge_indexes,
    part_index,
)
from jaxckpt_train.store.removal import refuse_reserved_name, remove_stale_temporaries
from jaxckpt_train.store.reuse import NOTHING_KNOWN
from jaxckpt_train.store.segment import ChunkSource
from jaxckpt_train.store.transaction import (
    Attempt,
    Transaction,
    begin,
    refuse_existing,
)
from jaxckpt_train.store.writer import WrittenArrays, write_arrays

T = TypeVar("T")
DIFFERS = b"differs"
_NO_INDEX = part_index()  # a single process needs no index of what it has written
MANY_PARTS, MANY_PARTS_EACH = 100_000, 16
"""With more parts of arrays than this, and more than this for each process, each process writes an index file."""


class SaveTarget(Protocol):
    """Where a checkpoint goes. The primary process calls the methods, on the thread that writes."""

    @property
    def info(self) -> Mapping[str, Any]:
        """The information for the manifest."""

    @property
    def replace(self) -> bool:
        """Whether an existing checkpoint is replaced."""

    def create_attempt(self) -> Transaction:
        """Create the attempt."""

    def writes_everything(self) -> bool:
        """Whether no file of the checkpoint before is to be taken over; asked after `create_attempt`."""

    def after_commit(self, committed: Committed) -> Any:
        """Record the commit, and return plain data for all processes. They all get an error; the checkpoint stays."""


@dataclasses.dataclass
class PathTarget:
    """A checkpoint at a path of its own, outside a run. Without a `transaction`, `create_attempt` checks the path."""

    backend: Backend
    final: str
    settings: StoreSettings
    info: Mapping[str, Any]
    replace: bool = False
    transaction: Transaction | None = None

    def check(self) -> None:
        """Raise CheckpointExistsError or SettingsError if the path is taken or reserved."""
        refuse_reserved_name(self.final)
        refuse_existing(self.backend, self.final, self.replace)

    def create_attempt(self) -> Transaction:
        """Remove leftovers of earlier attempts, and create this one."""
        if self.transaction is None:
            self.check()
        remove_stale_temporaries(self.backend, self.final)
        return self.transaction or begin(self.backend, self.final, self.settings)

    def writes_everything(self) -> bool:
        """Nothing is known of a checkpoint before."""
        return True

    def after_commit(self, committed: Committed) -> None:
        """Record nothing."""


class _Coming(msgspec.Struct):
    """What a process is about to save. `owners` maps arrays to the process whose devices hold them completely.

    Attributes:
        chunks: how many parts of arrays it writes.
        groups: a digest of the groups of arrays for index files.
    """

    subject: bytes
    own_values: dict[str, str]
    owners: dict[str, int]
    chunks: int
    groups: bytes


class BegunSave(msgspec.Struct):
    """The attempt. `shared` names the checkpointables with equal own values; `owners` is that of all processes.

    `seed` is that of the weights of boxes in index files; empty: there are none.
    """

    directory: bytes
    final: bytes
    info: bytes
    shared: tuple[str, ...]
    owners: dict[str, int]
    writes_everything: bool
    seed: bytes


class _Done(msgspec.Struct):
    """The primary's message about the committed checkpoint."""

    sha256: str
    bytes: int
    result: Any


class CheckpointSave:
    """One save of one checkpoint, as a process of the job performs it, with a coordinator for this save only.

    Attributes:
        subject: the name of what is saved, for messages; the same in all processes.
        transaction: in the primary, the attempt, once it exists.
        result: what `SaveTarget.after_commit` returned in the primary.
    """

    def __init__(
        self,
        job: Coordinator,
        subject: str,
        backend: Backend,
        settings: StoreSettings,
        unchanged: UnchangedLeaves | None = None,
    ) -> None:
        self._job, self._backend, self._settings = job, backend, settings
        self.subject, self._beginning = subject, f"beginning to save {subject}"
        self.parts: Sequence[StagedPart] = ()
        self.times, self.tracker = SaveTimes(), ProgressTracker()
        self.result: Any = None
        self._is_single_process = job.processes == 1
        self.transaction: Transaction | None = None
        self._directory = self._final = ""
        self._shared: frozenset[str] = frozenset()
        self._comparison = _ContentComparison(settings.digest)
        # What this process has written; the chunks of arrays are only here if no index of another process is merged.
        self._unchanged, self._written = unchanged, dict[str, tuple[int, WrittenArrays]]()
        self._records: list[PartRecord] = []
        self._index_seed, self._divided = b"", list[PartIndex]()  # what goes into an index file, of each part
        self._segments: list[SegmentRecord] = []
        self._committed: Committed | None = None

    def stage(self, checkpointables: Mapping[str, Any]) -> None:
        """Stage all checkpointables as they are now."""
        partition = None if self._is_single_process else JobPartition(self._job.process, self._job.processes)
        last = None if self._unchanged is None else self._unchanged.last
        self.parts = stage_all(checkpointables, self.times, self._settings, partition, last)
        self.tracker = make_tracker(self.parts)
        if self._unchanged is not None:
            self._unchanged.look(self.parts)

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Raise an error of the context in the other processes, too, and release the state. Use it before `start`."""
        try:
            yield
        except BaseException as error:
            try:
                self._job.share_error(self._beginning, error)
            finally:
                self._end()
            raise

    def start(
        self, work: Callable[[], T], on_start: Callable[[PendingSave[T] | None], None] | None = None
    ) -> PendingSave[T]:
        """Start `work`, which calls `write_and_commit`, in the background; see `start_save`."""
        return start_save(self.subject, work, tracker=self.tracker, on_start=on_start, undo=self._undo)

    @property
    def is_committed(self) -> bool:
        """Whether this process has committed the checkpoint; never in a process other than the primary."""
        return self._committed is not None

    def _undo(self, error: BaseException) -> None:
        """Release the state, and remove the attempt if it is not committed."""
        close_parts(self.parts)
        if self.transaction is not None and not self.is_committed:
            self.transaction.abort_after(error)

    def write_and_commit(self, target: SaveTarget) -> Committed:
        """Begin, write this process's shards, and commit. An error of any process is raised in all, without a commit.

        The target is not kept: it may refer to this object, and such a ring would keep the state in memory.
        """
        try:
            committed = self._make_committed(target, self._begin(target))
            if self._unchanged is not None:
                self._unchanged.committed(self._final, self.parts, self._written)
            return committed
        except BaseException as error:
            if self._unchanged is not None:
                self._unchanged.forget()
            self._undo(error)
            raise
        finally:
            self._end()

    def _make_committed(self, target: SaveTarget, begun: BegunSave) -> Committed:
        done = self._write_everywhere(begun, functools.partial(self._commit, target))
        return self._committed or self._committed_elsewhere(begun, done)

    def _write_everywhere(self, begun: BegunSave, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Write the shards of all processes, and return what `merge` made in the primary of what they have written."""
        if begun.owners:
            self._own(begun.owners)
        # While this process waits, the progress of the others counts as progress of this save.
        done = self._job.exchange(f"saving {self.subject}", self._write, merge, self.tracker.sign, self.tracker)
        if done == DIFFERS:
            doing = f"comparing what the processes save as {self.subject}"
            encoded = functools.partial(self._comparison.encoded, self.parts)
            self._job.exchange(doing, encoded, _refuse_differences, self.tracker.sign)
        return done

    def _end(self) -> None:
        close_parts(self.parts)
        self._job.end()

    def _begin(self, target: SaveTarget) -> BegunSave:
        begin = functools.partial(self._begin_attempt, target)
        answer = self._job.exchange(self._beginning, self._coming, begin, self.tracker.sign)
        begun = msgspec.msgpack.decode(answer, type=BegunSave)
        self._directory, self._final = os.fsdecode(begun.directory), os.fsdecode(begun.final)
        self._shared, self._index_seed = frozenset(begun.shared), begun.seed
        if begun.writes_everything and self._unchanged is not None:
            self._unchanged.forget()
        return begun

    def _coming(self) -> bytes:
        own_values = {part.name: self._comparison.digest(part.same) for part in self.parts if part.same is not None}
        owners = {
            f"{part.name}/{part.snapshot.arrays[number].name}": process
            for part in self.parts
            if part.snapshot is not None
            for number, process in part.snapshot.owners.items()
        }
        arrays = [() if part.snapshot is None else part.snapshot.arrays for part in self.parts]
        chunks = sum(len(array.chunks) for own in arrays for array in own)
        groups = b"" if self._is_single_process else ArrayGroups(arrays).digest()
        return msgspec.msgpack.encode(_Coming(os.fsencode(self.subject), own_values, owners, chunks, groups))

    def _begin_attempt(self, target: SaveTarget, values: Sequence[bytes]) -> bytes:
        """In the primary: create the attempt if all processes save the same."""
        coming = [msgspec.msgpack.decode(value, type=_Coming) for value in values]
        for process, each in enumerate(coming):
            if (subject := os.fsdecode(each.subject)) != self.subject:
                raise OtherProcessError(
                    f"process {process} saves {subject}, but process 0 saves {self.subject}; all processes "
                    "of a job must save the same steps in the same order"
                )
        own = coming[0].own_values
        shared = tuple(name for name in own if all(each.own_values.get(name) == own[name] for each in coming))
        self.transaction = transaction = target.create_attempt()
        for part in self.parts:
            transaction.add_folder(part.name)
        paths = os.fsencode(transaction.directory), os.fsencode(transaction.committed_at)
        owners = {name: owner for each in coming for name, owner in each.owners.items()}
        info, everything = msgspec.json.encode(target.info), target.writes_everything()
        seed = secrets.token_bytes(SEED_BYTES) if self._writes_index_files(coming) else b""
        return msgspec.msgpack.encode(BegunSave(*paths, info, shared, owners, everything, seed))

    def _writes_index_files(self, coming: Sequence[_Coming]) -> bool:
        """Whether each process writes an index file. Readers must form the same groups of arrays as all writers."""
        has_arrays = any(part.snapshot is not None and part.snapshot.arrays for part in self.parts)
        if self._is_single_process or not has_arrays or any(each.groups != coming[0].groups for each in coming):
            return False
        if self._settings.index_files != "auto":
            return self._settings.index_files
        return sum(each.chunks for each in coming) > max(MANY_PARTS, MANY_PARTS_EACH * self._job.processes)

    def _own(self, owners: Mapping[str, int]) -> None:
        for part in self.parts:
            if part.snapshot is not None:
                for number in list(part.snapshot.local):
                    if owners.get(f"{part.name}/{part.snapshot.arrays[number].name}") == self._job.process:
                        part.snapshot.own(number)

    def _write(self) -> bytes:
        """Write the shards of all parts, and return their encoded index for the primary."""
        if not self._is_single_process:
            self._refuse_unseen()
        wait_for_devices(self.parts, self.times)
        check_finite(self._final, self.parts, self._settings)
        started, indexes = time.perf_counter(), list[PartIndex]()
        for part in self.parts:
            self._progress(0)
            if part.snapshot is None:
                indexes.append(self._write_value(part))
                continue
            written = write_arrays(
                self._backend,
                self._directory,
                part.name,
                part.snapshot.arrays,
                self._settings,
                first_segment=len(self._segments),
                progress=self._progress,
                process=self._job.process,
                known=NOTHING_KNOWN if self._unchanged is None else self._unchanged.known(part),
                whole_apart=bool(self._index_seed),
                taken_from=self._opener_of_taken_files(),
            )
            indexes.append(self._record_arrays(part, part.snapshot, written))
        self.times.write_s = time.perf_counter() - started
        if self._is_single_process:
            return b""
        alike, taken_bytes = self._comparison.of_all(self.parts), self.times.taken_bytes
        summary = self._write_index_file() if self._index_seed else None
        return encode_index(ProcessIndex(alike, tuple(indexes), taken_bytes, summary))

    def _write_index_file(self) -> IndexSummary:
        """Write the list of the parts of arrays that this process has written."""
        summary, data = encode_index_file(self._records, self._divided, self._index_seed, self._settings.digest)
        if data:
            self._write_own_file(index_name(folder_of(self._records), self._job.process), data)
        return summary

    def _sees_all_files(self) -> bool:
        """Whether each process writes into a directory in which it sees the files of the others at once."""
        return not is_url(self._directory)

    def _opener_of_taken_files(self) -> Opener | None:
        """Opens files of the checkpoint before, which are verified before they are taken over; None: they are not."""
        return None

    def _refuse_unseen(self) -> None:
        """Raise CheckpointError if this process does not see the directory that the primary has created."""
        if not self._sees_all_files():  # it exists with its first object
            return
        try:
            self._backend.list(self._directory)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CheckpointError(
                f"{self._directory}: process 0 created this directory, but process {self._job.process} does not see "
                "it; all processes of a job must save to one directory on shared storage"
            ) from error

    def _refuse_missing(
        self, segments: Sequence[SegmentRecord], parts: Sequence[PartRecord], indexes: Sequence[ProcessIndex]
    ) -> None:
        """In the primary: raise CheckpointError if it does not see the objects that the other processes have put."""
        if not is_url(self._directory):  # where they have seen the directory
            return
        wanted = {each.file for each in segments} | {file.file for part in parts for file in part.files}
        with_file = [process for process, each in enumerate(indexes) if each.summary is not None and each.summary.size]
        wanted |= {index_name(folder_of(parts), process) for process in with_file}
        folders = {name.rpartition("/")[0] for name in wanted}
        there = {f"{each}/{entry.name}" for each in folders for entry in self._listed(f"{self._directory}/{each}")}
        if missing := sorted(wanted - there):
            raise CheckpointError(
                f"{self._directory}: another process has put {missing[0]}, but process 0 does not see it; all "
                "processes of a job must reach the same object store: compare their endpoints and credentials"
            )

    def _listed(self, folder: str) -> Sequence[Entry]:
        try:
            return self._backend.list(folder)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return ()

    def _write_value(self, part: StagedPart) -> PartIndex:
        files = self._own_value(part)
        if part.own_files is not None and not self._sees_all_files():
            files = self._upload_own_files(part, part.own_files)
        elif part.own_files is not None:  # the primary adopts them when it commits
            part.own_files.write(Path(self._directory, part.name))
        recorded = files if self._is_single_process else ()
        self._records.append(PartRecord(part.name, part.kind, (), recorded, msgspec.Raw(b"null")))
        self._divided.append(_NO_INDEX)
        return part_index(files=files)

    def _upload_own_files(self, part: StagedPart, own_files: OwnFiles) -> tuple[FileRecord, ...]:
        """Let an object write its files into a local folder, and copy them to the attempt on the object store."""
        with temporary_folder() as local:
            self._backend.make_directory(f"{local}/{part.name}", parents=False, sync=False)
            own_files.write(Path(local, part.name))
            attempt = self.transaction or Attempt(self._backend, self._directory, self._settings)
            return attempt.upload_folder(local, part.name, self._progress)

    def _record_arrays(self, part: StagedPart, taken: Snapshot, written: WrittenArrays) -> PartIndex:
        if taken.on_hosts is not None:  # only in a single process, which controls the devices of several hosts
            written = write_on_hosts(
                self._directory,
                part.name,
                taken.arrays,
                taken.on_hosts,
                written,
                self._segments,
                self._settings,
                self._progress,
            )
        else:
            self._written[part.name] = len(self._segments), written
        self.times.bytes += written.data_bytes
        self.times.taken_bytes += written.taken_bytes
        arrays, index = written.arrays, _NO_INDEX
        if self._is_single_process:
            self._segments += written.segments
        else:
            self._comparison.add_local(part, written)
            chunks = {number: array.chunks for number, array in enumerate(arrays) if array.chunks}
            if self._index_seed:
                index, divided = divided_index(written.segments, chunks, arrays)
                self._divided.append(divided)
            else:
                index = part_index(written.segments, chunks)
            arrays = tuple(msgspec.structs.replace(array, chunks=()) for array in arrays)
        self._records.append(PartRecord(part.name, part.kind, arrays, (), encode_tree(taken.record)))
        return index

    def _own_value(self, part: StagedPart) -> tuple[FileRecord, ...]:
        """Write this process's value of a part to its own file, unless one file stands for all processes."""
        if self._is_common(part):
            return ()
        assert part.value is not None
        return (self._write_own_file(value_file(part.name, self._job.process), part.value),)

    def _write_own_file(self, name: str, data: bytes) -> FileRecord:
        attempt = self.transaction or Attempt(self._backend, self._directory, self._settings)
        record = attempt.write_file(name, data)
        if attempt is not self.transaction:  # the transaction syncs when it commits
            attempt.sync()
        return record

    def _is_common(self, part: StagedPart) -> bool:
        """Whether the primary writes the value of a part, if it has one, for all processes."""
        return part.value is None or part.same is None or part.name in self._shared

    def _progress(self, done: int) -> None:
        self.tracker(done)
        if self._job.has_failed_elsewhere():
            raise CheckpointError(f"saving {self.subject}: stopped, because another process failed")

    def _commit(self, target: SaveTarget, values: Sequence[bytes]) -> bytes:
        """In the primary: commit what all processes have written, unless they differ in what must be the same."""
        started, transaction = time.perf_counter(), self.transaction
        manifest = self._merge(target, values)
        if manifest is None:
            return DIFFERS
        assert transaction is not None
        begun = time.perf_counter()
        self.times.write_s += begun - started
        self._committed = committed = transaction.commit(manifest, replace=target.replace)
        self.times.commit_s = time.perf_counter() - begun
        return self._done(target, committed)

    def _done(self, target: SaveTarget, committed: Committed) -> bytes:
        """In the primary: record the commit, and return the message about it."""
        self.result = target.after_commit(committed)
        return msgspec.msgpack.encode(_Done(committed.manifest_sha256, committed.data_bytes, self.result))

    def _merge(self, target: SaveTarget, values: Sequence[bytes]) -> Manifest | None:
        """In the primary: the manifest of what all processes have written; None: they differ in what must be equal."""
        transaction = self.transaction
        assert transaction is not None
        segments, parts, index = self._segments, self._records, None
        if not self._is_single_process:
            indexes = [decode_index(value) for value in values]
            if any(index.alike != indexes[0].alike for index in indexes):
                return None
            segments, parts = merge_indexes(self._records, indexes)
            self.times.taken_bytes = sum(index.taken_bytes for index in indexes)
            index = self._write_tables(
                transaction, parts, [each.summary for each in indexes if each.summary is not None]
            )
            self._refuse_missing(segments, parts, indexes)
        for number, part in enumerate(self.parts):
            self._progress(0)
            if part.own_files is not None:
                if not self._sees_all_files():  # every process has written its files
                    files = _without_repetitions(part.name, parts[number].files)
                else:
                    files = transaction.adopt_folder(part.name, self._progress)
                parts[number] = msgspec.structs.replace(parts[number], files=files)
            elif part.value is not None and self._is_common(part):
                file = transaction.write_file(value_file(part.name), part.value)
                parts[number] = msgspec.structs.replace(parts[number], files=(file,))
        taken = {"taken_bytes": self.times.taken_bytes} if self.times.taken_bytes else {}
        return self._manifest({**target.info, **taken}, segments, parts, index)

    def _committed_elsewhere(self, begun: BegunSave, done: bytes) -> Committed:
        """In the other processes: describe the checkpoint that the primary has committed."""
        message = msgspec.msgpack.decode(done, type=_Done)
        self.result = message.result
        manifest = self._manifest(msgspec.json.decode(begun.info), (), self._records)
        return Committed(self._final, manifest, message.sha256, message.bytes)

    def _write_tables(
        self, transaction: Transaction, parts: Sequence[PartRecord], summaries: Sequence[IndexSummary]
    ) -> IndexRecord | None:
        """In the primary: write the list of the index files, if there are any."""
        found = encode_tables(parts, summaries, self._index_seed, self._settings.digest) if summaries else None
        if found is None:
            return None
        transaction.write_file(found[0].file, found[1])
        return found[0]

    def _manifest(
        self,
        info: Mapping[str, Any],
        segments: Sequence[SegmentRecord],
        parts: Sequence[PartRecord],
        index: IndexRecord | None = None,
    ) -> Manifest:
        digest = self._settings.digest
        version = FORMAT_VERSION if index is None else INDEXED_VERSION
        return Manifest(FORMAT, version, digest, BLOCK_BYTES, tuple(segments), tuple(parts), dict(info), index)


def _without_repetitions(name: str, files: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    """The files that the processes of a job have written, once each. Raises MismatchError: two wrote different ones."""
    found = {file.file: file for file in files}
    for file in files:
        if found[file.file] != file:
            raise MismatchError(f"checkpointable {name!r}: two processes wrote different files {file.file!r}")
    return tuple(found[file] for file in sorted(found))


class _ContentComparison:
    """Digests of the content that one process saves, for a comparison with the other processes."""

    def __init__(self, digest_name: str) -> None:
        self.digest = digest_function(digest_name)
        self._local: dict[str, str] = {}  # digests of the leaves that each process has for itself

    def add_local(self, part: StagedPart, written: WrittenArrays) -> None:
        """Add the arrays of a part that each process has for itself; `written` are this process's arrays."""
        assert part.snapshot is not None
        for number in part.snapshot.local:
            array, other = written.arrays[number], part.snapshot.compared.get(number)
            if other is None:
                found = sorted((chunk.box, chunk.digests) for chunk in array.chunks)
            else:
                found = sorted((chunk.box, self._digests(chunk)) for chunk in other if chunk.data.nbytes)
            self._local[f"{part.name}/{array.name}"] = self.digest(msgspec.msgpack.encode(found))

    def _digests(self, chunk: ChunkSource) -> str:
        data = chunk.data.fetch() if hasattr(chunk.data, "fetch") else np.asarray(chunk.data)
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return block_digests(flat, BLOCK_BYTES, self.digest)

    def of_all(self, parts: Sequence[StagedPart]) -> str:
        return self.digest(msgspec.msgpack.encode([*self._content(parts)]))

    def encoded(self, parts: Sequence[StagedPart]) -> bytes:
        digests = [(label, self.digest(msgspec.msgpack.encode(content))) for label, content in self._content(parts)]
        return msgspec.msgpack.encode(digests)

    def _content(self, parts: Sequence[StagedPart]) -> Iterator[tuple[str, Any]]:
        for part in parts:
            label = f"checkpointable {part.name!r}"
            yield f"{label}: its kind", part.kind
            if part.value is not None and part.same is None:
                yield f"{label}: its value", self.digest(part.value)
            if part.snapshot is not None:
                local, record = set(part.snapshot.local), part.snapshot.record
                arrays = enumerate(part.snapshot.arrays)
                forms = {array.name: (array.shape, str(array.dtype), number in local) for number, array in arrays}
                yield f"{label}: its structure", record.containers
                for name, leaf in record.leaves.items():
                    yield f"leaf {f'{part.name}/{name}'!r}", (leaf, forms.get(name))
        for name, digest in self._local.items():
            yield f"leaf {name!r}: its values", digest


def _refuse_differences(values: Sequence[bytes]) -> bytes:
    """In the primary process: raise MismatchError with the names of the differences."""
    found = [dict(msgspec.msgpack.decode(value, type=list[tuple[str, str]])) for value in values]
    lines = []
    for label in {label: None for each in found for label in each}:
        digests = [each.get(label) for each in found]
        most = Counter(digests).most_common(1)[0][0]
        others = [str(number) for number, digest in enumerate(digests) if digest != most]
        if others:
            lines.append(f"{label}: differs in process {first_of(others)}")
    shown = first_of(lines, ";") or "a value that changes between two reads"
    raise MismatchError(
        f"the processes of this job do not save the same values: {shown}. A value that each process has for "
        "itself must be equal in all of them; otherwise make one array of it that spans the devices of all processes"
    )
