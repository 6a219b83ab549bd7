"""Verify a committed checkpoint: read every byte of every file and compare it with the manifest.

`copy_verified` also writes what it reads into an attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Literal

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError, CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import (
    Backend,
    Identified,
    Opener,
    Sharing,
    Sink,
    Source,
    is_storage_failure,
)
from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import Committed, index_files, open_committed
from jaxckpt_train.store.files import open_recorded, read_intact
from jaxckpt_train.store.index_files import SEED_BYTES, SEEDS
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    HEX_DIGITS,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    Manifest,
    SegmentRecord,
    digest_function,
)
from jaxckpt_train.store.reuse import MIN_APART_BYTES
from jaxckpt_train.store.segment import ALIGNMENT, DTYPES, Tensor, chunk_name, is_head_of, safetensors_form
from jaxckpt_train.store.threads import shared_workers
from jaxckpt_train.store.timeouts import report_progress
from jaxckpt_train.store.transaction import Attempt

Pace = Callable[[int], None]
_Chunks = list[tuple[ArrayRecord, ChunkRecord]]
_Segment = tuple[SegmentRecord, _Chunks]
_File = tuple[SegmentRecord | FileRecord, _Chunks]
"""A file of a checkpoint; a segment with its chunks in file order."""


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        directory: the checkpoint.
        checked_bytes: how many bytes were read and compared, without those that are missing or cannot be read.
        problems: one line for each damaged place and each unreadable file; empty if the checkpoint is valid.
        refused: those problems where the storage refused a read for a reason that is not the checkpoint's fault.
    """

    directory: str
    checked_bytes: int
    problems: tuple[str, ...]
    refused: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def is_damaged(self) -> bool:
        """Whether there is real damage, and not only refused reads."""
        return len(self.problems) > len(self.refused)


class IntactFiles:
    """Segments with several names that one pass over some checkpoints has found intact, so that it reads each once.

    Damage that happens later, without a write, is found by the next pass, which begins with `clear`.

    Attributes:
        unread_bytes: the size of the files that were not read again.
    """

    def __init__(self) -> None:
        self._found, self.unread_bytes = set[tuple[tuple[int, ...], bytes]](), 0

    def clear(self) -> None:
        """Begin a pass."""
        self._found.clear()

    def has(self, source: Source, expected: bytes) -> bool:
        """Whether this file was found to be what is expected, by another name."""
        is_known = isinstance(source, Identified) and (source.identity, expected) in self._found
        self.unread_bytes += source.size if is_known else 0
        return is_known

    def add(self, source: Source, expected: bytes) -> None:
        """Remember a file that is what is expected, unless it has only one name."""
        if isinstance(source, Identified) and source.identity is not None:
            self._found.add((source.identity, expected))


def verify(backend: Backend, directory: str, settings: StoreSettings) -> VerifyReport:
    """Check COMMIT, the manifest, the segment headers, every block of data and every plain file.

    Damage is reported, not raised. An error of `interruptible` ends the verification.

    Raises NotACheckpointError: there is no checkpoint; FormatVersionError: a newer version of this library wrote it;
    CheckpointTimeoutError: the storage has not responded for ten minutes.
    """
    try:
        committed = open_committed(backend, directory, is_complete=False)
    except CorruptCheckpointError as error:
        return VerifyReport(directory, 0, (str(error),))
    return verify_opened(backend, committed, settings)


def verify_opened(backend: Backend, committed: Committed, settings: StoreSettings) -> VerifyReport:
    """As `verify`, for a checkpoint whose manifest has been read already."""
    refused, begun_bytes = set[str](), [0]  # counts blocks when their reads begin, to show that there is progress

    def begin(nbytes: int) -> None:
        begun_bytes[0] += nbytes

    def check(file: _File) -> tuple[str, list[str], int]:
        checked = _FileCheck(backend, committed, begin)
        found: list[str] = []
        try:
            found.extend(checked.problems(file))
        except StorageError as error:
            found.append(str(error))
            refused.update([str(error)] if is_storage_failure(error) else [])
        return file[0].file, found, checked.compared_bytes

    workers, found = shared_workers(settings.io_threads, "jaxckpt-read"), list[tuple[str, list[str], int]]()
    try:
        for files in files_by_index(backend, committed):
            with contextlib.closing(workers.run_each(check, files, moved=lambda: begun_bytes[0])) as results:
                found += results
    except (CorruptCheckpointError, StorageError) as error:  # of an index file
        found.append(("", [str(error)], 0))
        refused.update([str(error)] if isinstance(error, StorageError) and is_storage_failure(error) else [])
    found.sort()
    problems = tuple(problem for _, of_file, _ in found for problem in of_file)
    size = sum(compared for *_, compared in found)
    return VerifyReport(committed.directory, size, problems, tuple(each for each in problems if each in refused))


def first_damage(
    backend: Backend, directory: str, pace: Pace | None = None, intact: IntactFiles | None = None
) -> str | None:
    """The first problem of a checkpoint, or None; works on the calling thread and avoids the page cache if possible.

    `pace` is called with the size of each block before it is read, and may wait. Files that are `intact` are not read
    again. Raises NotACheckpointError, FormatVersionError: as `verify`; StorageError: the storage refused, which is not
    damage.
    """
    if pace is not None:
        pace(_manifest_bytes(backend, directory))
    try:
        committed = open_committed(backend, directory, is_complete=False)
        check = _FileCheck(backend, committed, pace, intact=intact)
        files = itertools.chain.from_iterable(files_by_index(backend, committed))
        problems = (check.problems(file, direct="auto") for file in files)
        return next(itertools.chain.from_iterable(problems), None)
    except CorruptCheckpointError as error:
        return str(error)


def copy_verified(
    files: Opener,
    committed: Committed,
    attempt: Attempt,
    settings: StoreSettings,
    progress: Callable[[int], object],
    only: Collection[str] | None = None,
    *,
    direct: bool | Literal["auto"] = False,
) -> None:
    """Copy files of a checkpoint into an attempt, which has their folders, and compare each block with its digest.

    `only` names the files; None: all of them. `direct`: whether segments are written past the page cache. A copy shares
    the blocks of its source where the file system can. It is never a link, which would share all changes. `progress` is
    called with numbers of bytes, from several threads.

    Raises CorruptCheckpointError: the checkpoint is damaged; StorageError: a file system refused;
    CheckpointTimeoutError: as `verify`.
    """
    wanted = [file for file in _files_of(committed.manifest) if only is None or file[0].file in only]
    is_ended, begun_bytes, can_share = threading.Event(), [0], isinstance(files, Sharing)
    copied = dataclasses.replace(committed, directory=attempt.directory)

    def begin(nbytes: int) -> None:
        if is_ended.is_set():
            raise CheckpointTimeoutError(f"{committed.directory}: the copy was abandoned")
        begun_bytes[0] += nbytes
        progress(nbytes)

    def copy(file: _File) -> None:
        name = file[0].file
        if can_share and attempt.share_file(f"{committed.directory}/{name}", name):
            if next(_FileCheck(files, copied, begin).problems(file), None) is None:
                return
            attempt.drop_file(name)  # a copy byte by byte names the damage of the source
        sink = attempt.create_file(name, direct if isinstance(file[0], SegmentRecord) else False)
        try:
            for problem in _FileCheck(files, committed, begin, sink).problems(file):
                raise CorruptCheckpointError(problem)
            sink.finish(file[0].bytes, sync=False)
        finally:
            sink.abandon()

    workers = shared_workers(settings.io_threads, f"jaxckpt-copying{attempt.tier}")
    copying = workers.run_each(copy, wanted, give_up=is_ended.set, moved=lambda: begun_bytes[0])
    with contextlib.closing(copying) as results:
        for _ in results:
            pass


def unchanged_files(before: Committed, committed: Committed) -> dict[str, tuple[str, int]]:
    """The larger data files of a checkpoint that an older one has, too, by what the manifests say.

    By their paths: those in the older one, and the sizes.
    """
    there = {_content_of(before.manifest, each): each[0].file for each in _segments_of(before.manifest)}
    found = [(each[0], there.get(_content_of(committed.manifest, each))) for each in _segments_of(committed.manifest)]
    return {now.file: (was, now.bytes) for now, was in found if was is not None and now.bytes >= MIN_APART_BYTES}


def _manifest_bytes(backend: Backend, directory: str) -> int:
    """The size of the manifest; 0 if it is missing or too large, which `open_committed` reports."""
    try:
        source = backend.open(directory, MANIFEST_NAME, direct=False)
    except StorageError:
        return 0
    source.close()
    return source.size if source.size <= MAX_MANIFEST_BYTES else 0


def file_problems(
    files: Opener, committed: Committed, file: FileRecord, *, digests: bool = True, pace: Pace | None = None
) -> Iterator[str]:
    """Yield the problems of one plain file; without `digests`, check only its size. Raises as `first_damage`."""
    return _FileCheck(files, committed, pace).file_problems(file, digests=digests)


def segment_problem(files: Opener, directory: str, digest: str, segment: SegmentRecord, chunks: _Chunks) -> str | None:
    """The first problem of a segment, with these chunks; None: it is intact. Raises as `first_damage`."""
    manifest = Manifest(FORMAT, FORMAT_VERSION, digest, BLOCK_BYTES, (segment,), (), {})
    check = _FileCheck(files, Committed(directory, manifest, ""), lambda _: report_progress())
    return next(check.problems((segment, sorted(chunks, key=lambda each: each[1].offset))), None)


class _FileCheck:
    """Compares files of a checkpoint with its manifest; the problems are yielded as they are found.

    What it reads is also written to `copy`, from the memory that is compared.
    """

    def __init__(
        self,
        files: Opener,
        committed: Committed,
        pace: Pace | None,
        copy: Sink | None = None,
        intact: IntactFiles | None = None,
    ) -> None:
        self._files, self._directory, self._manifest, self._pace = files, committed.directory, committed.manifest, pace
        self._digest, self._copy, self._intact = digest_function(self._manifest.digest), copy, intact
        self.compared_bytes = 0

    def problems(self, file: _File, direct: Literal["auto", False] = False) -> Iterator[str]:
        record, chunks = file
        if isinstance(record, FileRecord):
            return self.file_problems(record)
        return self._segment_problems(record, chunks, direct)

    def file_problems(self, file: FileRecord, *, digests: bool = True) -> Iterator[str]:
        try:
            source = open_recorded(self._files, self._directory, file.file, file.bytes)
        except CorruptCheckpointError as error:
            yield str(error)
            return
        with contextlib.closing(source):
            if digests:
                path = f"{self._directory}/{file.file}"
                yield from self._block_problems(source, path, "the file", 0, file.bytes, file.digests)

    def _segment_problems(
        self, record: SegmentRecord, chunks: _Chunks, direct: Literal["auto", False]
    ) -> Iterator[str]:
        path = f"{self._directory}/{record.file}"
        try:
            source = open_recorded(
                self._files, self._directory, record.file, record.bytes, direct=direct, subject="segment"
            )
        except CorruptCheckpointError as error:
            yield str(error)
            return
        with contextlib.closing(source):
            expected = b"" if self._intact is None else _content_of(self._manifest, (record, chunks))
            if self._intact is not None and self._intact.has(source, expected):
                return
            is_intact = True
            for problem in self._content_problems(source, path, record, chunks):
                is_intact = False
                yield problem
            if self._intact is not None and is_intact:
                self._intact.add(source, expected)

    def _content_problems(self, source: Source, path: str, record: SegmentRecord, chunks: _Chunks) -> Iterator[str]:
        yield from self._head_problems(source, path, record, chunks)
        for array, chunk in chunks:
            yield from self._block_problems(source, path, array.name, chunk.offset, chunk.length, chunk.digests)

    def _head_problems(self, source: Source, path: str, record: SegmentRecord, chunks: _Chunks) -> Iterator[str]:
        memory = aligned_buffer(-(-record.header_bytes // ALIGNMENT) * ALIGNMENT)
        try:
            head = self._read(source, 0, record.header_bytes, memory, record.header_digest)
        except CorruptCheckpointError as error:
            yield f"{path}: its header: {error}"
            return
        if head is None:
            yield f"{path}: its header is not what was saved ({self._manifest.digest} differs)"
        elif not is_head_of(head, _tensors(chunks, record.header_bytes)):
            yield f"{path}: its header does not match the tensors in the manifest"

    def _block_problems(
        self, source: Source, path: str, subject: str, start: int, length: int, digests: str
    ) -> Iterator[str]:
        width, block_bytes = HEX_DIGITS[self._manifest.digest], self._manifest.block_bytes
        memory = aligned_buffer(-(-min(length, block_bytes) // ALIGNMENT) * ALIGNMENT)
        for block, at in enumerate(range(start, start + length, block_bytes)):
            size = min(block_bytes, start + length - at)
            try:
                data = self._read(source, at, size, memory, digests[block * width : (block + 1) * width])
            except CorruptCheckpointError as error:
                yield f"{path}: {subject}: {error}"
                return
            if data is None:
                yield f"{path}: bytes {at} to {at + size} of {subject!r} are not what was saved"

    def _read(self, source: Source, at: int, size: int, memory: np.ndarray, expected: str) -> memoryview | None:
        """Read bytes of this digest, from another copy of the file if necessary; None: no copy has them."""
        if self._pace is not None:
            self._pace(size)
        source.read_into(at, memory[: -(-size // source.alignment) * source.alignment], size)
        data, view = memory[:size], memoryview(memory[:size])

        def is_intact() -> bool:
            return self._digest(view) == expected

        self.compared_bytes += size
        if not is_intact() and not read_intact(source, at, data, is_intact):
            return None
        if self._copy is not None:
            self._copy.write_at(at, data)
        return view


def _content_of(manifest: Manifest, segment: _Segment) -> bytes:
    """A digest of all that the manifest says of the content of a segment."""
    record, chunks = segment
    arrays = [(array.name, array.shape, array.dtype, each.box, each.offset, each.digests) for array, each in chunks]
    said = (manifest.digest, manifest.block_bytes, record.bytes, record.header_digest, arrays)
    return hashlib.sha256(msgspec.json.encode(said)).digest()


def _tensors(chunks: _Chunks, data_start: int) -> Iterator[Tensor]:
    for array, chunk in chunks:
        dtype, shape = safetensors_form(DTYPES[array.dtype], box_shape(chunk.box))
        start = chunk.offset - data_start
        yield Tensor(chunk_name(array.name, chunk.box, array.shape), dtype, shape, start, start + chunk.length)


def files_by_index(files: Opener, committed: Committed) -> Iterator[list[_File]]:
    """The files in the manifest, then those in each index file. Raises CorruptCheckpointError: one is damaged."""
    yield _files_of(committed.manifest)
    indexes = index_files(files, committed)
    if indexes is None:
        return
    parts, seed = committed.manifest.parts, secrets.token_bytes(SEED_BYTES)
    segments, sums = list[SegmentRecord](), np.zeros(SEEDS, np.int64)
    for entry, data in indexes.contents():
        found, names = indexes.chunks_of(entry, data), list[_File]()
        for part, indexed in zip(parts, found, strict=True):
            of_segments: list[_Chunks] = [[] for _ in indexed.segments]
            for place, chunk in indexed.chunks(0):
                of_segments[chunk.segment].append((part.arrays[place], chunk))
            for record, chunks in zip(indexed.segments, of_segments, strict=True):
                names.append((record, sorted(chunks, key=lambda each: each[1].offset)))
                segments.append(record)
        sums += indexes.weights(found, seed)
        yield names
    indexes.check_totals(segments)
    indexes.check_weights(sums, seed)


def _files_of(manifest: Manifest) -> list[_File]:
    """The segments and plain files in the manifest."""
    found: list[_File] = [*_segments_of(manifest)]
    found.extend((file, []) for part in manifest.parts for file in part.files)
    return found


def _segments_of(manifest: Manifest) -> list[_Segment]:
    found: list[_Chunks] = [[] for _ in manifest.segments]
    for array in [array for part in manifest.parts for array in part.arrays]:
        for chunk in array.chunks:
            found[chunk.segment].append((array, chunk))
    for chunks in found:
        chunks.sort(key=lambda each: each[1].offset)
    return list(zip(manifest.segments, found, strict=True))
