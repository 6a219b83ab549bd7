"""Verifies a committed checkpoint: every byte of every file is read and compared with what the manifest says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Source
from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.digests import HEX_DIGITS, digest_function
from jaxckpt_train.store.dtypes import DTYPES, safetensors_form
from jaxckpt_train.store.layout import chunk_name
from jaxckpt_train.store.manifest import FileRecord, Manifest
from jaxckpt_train.store.plain_files import open_recorded
from jaxckpt_train.store.segment import LENGTH_BYTES, Tensor, decode_header, header_length
from jaxckpt_train.store.transaction import Committed, open_committed
from jaxckpt_train.store.workers import shared_workers


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        directory: the checkpoint.
        checked_bytes: how many bytes were read and compared.
        problems: one line for each damage; empty when all is well.
    """

    directory: str
    checked_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(backend: Backend, directory: str, settings: StoreSettings) -> VerifyReport:
    """Check COMMIT, manifest, segment heads, every block of data and every plain file.

    Damage is reported, not raised.

    Raises:
        NotACheckpointError: there is nothing to verify.
        FormatVersionError: written by a newer version.
    """
    try:
        committed = open_committed(backend, directory)
    except CorruptCheckpointError as error:
        return VerifyReport(directory, 0, (str(error),))
    files = [file for part in committed.manifest.parts for file in part.files]
    found: dict[str, list[str]] = {}

    def check_segment(number: int) -> None:
        found[committed.manifest.segments[number].file] = _all(_segment_problems(backend, committed, number))

    def check_file(file: FileRecord) -> None:
        found[file.file] = _all(file_problems(backend, committed, file))

    workers = shared_workers(settings.known_io_threads, "jaxckpt-read")
    workers.run_all(check_segment, range(len(committed.manifest.segments)))
    workers.run_all(check_file, files)
    size = sum(segment.bytes for segment in committed.manifest.segments) + sum(file.bytes for file in files)
    return VerifyReport(committed.directory, size, tuple(problem for file in sorted(found) for problem in found[file]))


def _all(problems: Iterator[str]) -> list[str]:
    """The problems; a refusal of the storage is one more."""
    found: list[str] = []
    try:
        found.extend(problems)
    except StorageError as error:
        found.append(str(error))
    return found


def file_problems(backend: Backend, committed: Committed, file: FileRecord, *, digests: bool = True) -> Iterator[str]:
    """What is wrong with one plain file, if anything; without `digests`, only with its size.

    Raises:
        StorageError: the storage refused for a reason that is not the checkpoint's fault.
    """
    try:
        source = open_recorded(backend, committed.directory, file.file, file.bytes)
    except CorruptCheckpointError as error:
        yield str(error)
        return
    try:
        if digests:
            path = f"{committed.directory}/{file.file}"
            yield from _block_problems(source, path, 0, file.bytes, file.digests, committed.manifest, "the file")
    finally:
        source.close()


def _segment_problems(backend: Backend, committed: Committed, number: int) -> Iterator[str]:
    record = committed.manifest.segments[number]
    path = f"{committed.directory}/{record.file}"
    try:
        source = open_recorded(backend, committed.directory, record.file, record.bytes, subject="segment")
    except (CorruptCheckpointError, StorageError) as error:
        yield str(error)
        return
    try:
        yield from _head_problems(source, path, committed.manifest, number)
        for part in committed.manifest.parts:
            for array in part.arrays:
                for chunk in array.chunks:
                    if chunk.segment == number:
                        yield from _block_problems(
                            source, path, chunk.offset, chunk.length, chunk.digests, committed.manifest, array.name
                        )
    finally:
        source.close()


def _head_problems(source: Source, path: str, manifest: Manifest, number: int) -> Iterator[str]:
    record = manifest.segments[number]
    head = np.empty(record.header_bytes, np.uint8)
    try:
        source.read_into(0, head, record.header_bytes)
    except (CorruptCheckpointError, StorageError) as error:
        yield f"{path}: its header: {error}"
        return
    if digest_function(manifest.digest)(memoryview(head)) != record.header_digest:
        yield f"{path}: its header is not what was saved ({manifest.digest} differs)"
        return
    try:
        if header_length(head[:LENGTH_BYTES].tobytes(), record.bytes, path) != record.header_bytes:
            raise CorruptCheckpointError(f"{path}: header length is not the manifest's {record.header_bytes}")
        expected = set(_expected_tensors(manifest, number))
        most_objects = 2 + sum(1 + tensor.name.count("{") for tensor in expected)
        header = decode_header(head.tobytes(), record.bytes, path, most_objects)
    except CorruptCheckpointError as error:
        yield str(error)
        return
    if set(header.tensors) != expected:
        yield f"{path}: its header names other tensors than the manifest"


def _expected_tensors(manifest: Manifest, number: int) -> Iterator[Tensor]:
    data_start = manifest.segments[number].header_bytes
    for part in manifest.parts:
        for array in part.arrays:
            for chunk in array.chunks:
                if chunk.segment == number:
                    dtype, shape = safetensors_form(DTYPES[array.dtype], box_shape(chunk.box))
                    start = chunk.offset - data_start
                    name = chunk_name(array.name, chunk.box, array.shape)
                    yield Tensor(name, dtype, shape, start, start + chunk.length)


def _block_problems(
    source: Source, path: str, start: int, length: int, digests: str, manifest: Manifest, subject: str
) -> Iterator[str]:
    width = HEX_DIGITS[manifest.digest]
    digest = digest_function(manifest.digest)
    memory = np.empty(min(length, manifest.block_bytes), np.uint8)
    for block, at in enumerate(range(0, length, manifest.block_bytes)):
        size = min(manifest.block_bytes, length - at)
        try:
            source.read_into(start + at, memory[:size], size)
        except CorruptCheckpointError as error:
            yield f"{path}: {subject}: {error}"
            return
        if digest(memoryview(memory[:size])) != digests[block * width : (block + 1) * width]:
            yield f"{path}: bytes {start + at} to {start + at + size} of {subject!r} are not what was saved"
