"""Verify a committed checkpoint: read every byte of every file and compare it with the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener, Source, is_storage_failure
from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.dtypes import DTYPES, safetensors_form
from jaxckpt_train.store.files import digest_function, open_recorded
from jaxckpt_train.store.manifest import (
    HEX_DIGITS,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    Manifest,
    SegmentRecord,
)
from jaxckpt_train.store.segment import ALIGNMENT, Tensor, chunk_name, is_head_of
from jaxckpt_train.store.threads import shared_workers
from jaxckpt_train.store.timeouts import call_with_timeout

Pace = Callable[[int], None]
_Chunks = list[tuple[ArrayRecord, ChunkRecord]]


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


def verify(
    backend: Backend, directory: str, settings: StoreSettings, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Check COMMIT, the manifest, the segment headers, every block of data and every plain file.

    Damage is reported, not raised. `progress` is called with 0 at least once a second; its error ends the verification.

    Raises NotACheckpointError: there is no checkpoint; FormatVersionError: a newer version of this library wrote it;
    CheckpointTimeoutError: the storage has not responded for ten minutes.
    """
    try:
        committed = call_with_timeout(directory, lambda _: open_committed(backend, directory), progress)
    except CorruptCheckpointError as error:
        return VerifyReport(directory, 0, (str(error),))
    return verify_opened(backend, committed, settings, progress)


def verify_opened(
    backend: Backend, committed: Committed, settings: StoreSettings, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """As `verify`, for a checkpoint whose manifest has been read already."""
    files, read = [file for part in committed.manifest.parts for file in part.files], _Meter()
    refused = set[str]()
    chunks = _chunks_by_segment(committed.manifest)

    def check(subject: int | FileRecord) -> tuple[str, list[str], int]:
        compared = _Meter()  # counts this file only
        if isinstance(subject, FileRecord):
            problems = file_problems(backend, committed, subject, pace=read, compared=compared)
            return subject.file, _collect(problems, refused), compared.bytes
        segment = committed.manifest.segments[subject]
        problems = _segment_problems(backend, committed, segment, chunks[subject], read, compared=compared)
        return segment.file, _collect(problems, refused), compared.bytes

    def moved() -> int:
        if progress is not None:
            progress(0)
        return read.bytes

    subjects = [*range(len(committed.manifest.segments)), *files]
    workers = shared_workers(settings.known_io_threads, "jaxckpt-read")
    with contextlib.closing(workers.run_each(check, subjects, moved=moved)) as checked:
        found = sorted(checked)
    problems = tuple(problem for _, of_file, _ in found for problem in of_file)
    size = sum(compared for *_, compared in found)
    return VerifyReport(committed.directory, size, problems, tuple(each for each in problems if each in refused))


class _Meter:
    """Counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, nbytes: int) -> None:
        self.bytes += nbytes


def first_damage(backend: Backend, directory: str, pace: Pace | None = None) -> str | None:
    """The first problem of a checkpoint, or None; works on the calling thread and avoids the page cache if possible.

    Raises NotACheckpointError: there is no checkpoint; FormatVersionError: a newer version of this library wrote it;
    StorageError: the storage refused, which is not damage.
    """
    pace = _unpaced if pace is None else pace
    pace(_manifest_bytes(backend, directory))
    try:
        committed = open_committed(backend, directory)
    except CorruptCheckpointError as error:
        return str(error)
    for segment in zip(committed.manifest.segments, _chunks_by_segment(committed.manifest), strict=True):
        for problem in _segment_problems(backend, committed, *segment, pace, direct="auto"):
            return problem
    for part in committed.manifest.parts:
        for file in part.files:
            for problem in file_problems(backend, committed, file, pace=pace):
                return problem
    return None


def _manifest_bytes(backend: Backend, directory: str) -> int:
    """The size of the manifest; 0 if it is missing or too large, which `open_committed` reports."""
    try:
        source = backend.open(directory, MANIFEST_NAME, direct=False)
    except StorageError:
        return 0
    source.close()
    return source.size if source.size <= MAX_MANIFEST_BYTES else 0


def _unpaced(nbytes: int) -> None:
    """Do not limit the speed."""


def _collect(problems: Iterator[str], refused: set[str]) -> list[str]:
    """Collect the problems, and a refusal of the storage as one more; add that to `refused` if it is not damage."""
    found: list[str] = []
    try:
        found.extend(problems)
    except StorageError as error:
        found.append(str(error))
        refused |= {str(error)} if is_storage_failure(error) else set()
    return found


def file_problems(
    files: Opener,
    committed: Committed,
    file: FileRecord,
    *,
    digests: bool = True,
    pace: Pace = _unpaced,
    compared: Pace = _unpaced,
) -> Iterator[str]:
    """Yield the problems of one plain file; without `digests`, check only its size.

    `pace` is as in `first_damage`. `compared` is called with the number of bytes after each comparison.

    Raises StorageError: the storage refused for a reason that is not the checkpoint's fault.
    """
    try:
        source = open_recorded(files, committed.directory, file.file, file.bytes)
    except CorruptCheckpointError as error:
        yield str(error)
        return
    try:
        if digests:
            path = f"{committed.directory}/{file.file}"
            where = (0, file.bytes, file.digests)
            yield from _block_problems(source, path, *where, committed.manifest, "the file", pace, compared)
    finally:
        source.close()


def _segment_problems(
    backend: Backend,
    committed: Committed,
    record: SegmentRecord,
    chunks: _Chunks,
    pace: Pace,
    direct: Literal["auto", False] = False,
    compared: Pace = _unpaced,
) -> Iterator[str]:
    folder = committed.directory
    path = f"{folder}/{record.file}"
    try:
        source = open_recorded(backend, folder, record.file, record.bytes, direct=direct, subject="segment")
    except CorruptCheckpointError as error:
        yield str(error)
        return
    try:
        pace(record.header_bytes)
        yield from _head_problems(source, path, committed.manifest, record, chunks, compared)
        for array, chunk in chunks:
            where = (chunk.offset, chunk.length, chunk.digests)
            yield from _block_problems(source, path, *where, committed.manifest, array.name, pace, compared)
    finally:
        source.close()


def _head_problems(
    source: Source, path: str, manifest: Manifest, record: SegmentRecord, chunks: _Chunks, compared: Pace
) -> Iterator[str]:
    head = aligned_buffer(-(-record.header_bytes // ALIGNMENT) * ALIGNMENT)
    try:
        source.read_into(0, head[: -(-record.header_bytes // source.alignment) * source.alignment], record.header_bytes)
        head = head[: record.header_bytes]
    except CorruptCheckpointError as error:
        yield f"{path}: its header: {error}"
        return
    compared(record.header_bytes)
    if digest_function(manifest.digest)(memoryview(head)) != record.header_digest:
        yield f"{path}: its header is not what was saved ({manifest.digest} differs)"
        return
    if not is_head_of(memoryview(head), _tensors(chunks, record.header_bytes)):
        yield f"{path}: its header does not match the tensors in the manifest"


def _tensors(chunks: _Chunks, data_start: int) -> Iterator[Tensor]:
    for array, chunk in chunks:
        dtype, shape = safetensors_form(DTYPES[array.dtype], box_shape(chunk.box))
        start = chunk.offset - data_start
        yield Tensor(chunk_name(array.name, chunk.box, array.shape), dtype, shape, start, start + chunk.length)


def _chunks_by_segment(manifest: Manifest) -> list[_Chunks]:
    """The chunks of each segment in file order, each with its array."""
    found: list[_Chunks] = [[] for _ in manifest.segments]
    for part in manifest.parts:
        for array in part.arrays:
            for chunk in array.chunks:
                found[chunk.segment].append((array, chunk))
    for chunks in found:
        chunks.sort(key=lambda each: each[1].offset)
    return found


def _block_problems(
    source: Source,
    path: str,
    start: int,
    length: int,
    digests: str,
    manifest: Manifest,
    subject: str,
    pace: Pace,
    compared: Pace,
) -> Iterator[str]:
    width = HEX_DIGITS[manifest.digest]
    digest = digest_function(manifest.digest)
    whole = -(-min(length, manifest.block_bytes) // ALIGNMENT) * ALIGNMENT
    memory = aligned_buffer(whole)
    for block, at in enumerate(range(0, length, manifest.block_bytes)):
        size = min(manifest.block_bytes, length - at)
        try:
            pace(size)
            source.read_into(start + at, memory[: -(-size // source.alignment) * source.alignment], size)
        except CorruptCheckpointError as error:
            yield f"{path}: {subject}: {error}"
            return
        compared(size)
        if digest(memoryview(memory[:size])) != digests[block * width : (block + 1) * width]:
            yield f"{path}: bytes {start + at} to {start + at + size} of {subject!r} are not what was saved"
