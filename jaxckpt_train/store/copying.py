"""Copies an opened checkpoint, of whatever origin, into a new one: array by array, with little of it in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.layout import ArraySource, ChunkSource
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    ArrayRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.plain_files import read_recorded
from jaxckpt_train.store.reader import Progress, read_box
from jaxckpt_train.store.transaction import Committed, Transaction
from jaxckpt_train.store.writer import write_arrays

CHUNK_BYTES = 256 << 20
"""A larger array is copied in chunks of at most so many bytes, each of which is in memory at a time."""


class _BoxToCome:
    """A box of an array of the source, read when its turn comes to be written."""

    def __init__(self, box: Box, dtype: np.dtype, read: Callable[[Box, np.ndarray], None]) -> None:
        self._box, self._read = box, read
        self.shape, self.dtype = box_shape(box), dtype
        self.size = box_elements(box)
        self.nbytes = self.size * dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Read it."""
        data = np.empty(self.shape, self.dtype)
        self._read(self._box, data.reshape(-1).view(np.uint8))
        return data


def copy_checkpoint(
    files: Opener,
    source: Committed,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    info: Mapping[str, Any],
    parts: Sequence[str] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Committed:
    """Write what an opened checkpoint holds as a checkpoint of ours, and commit it.

    Args:
        files: what the source is read from.
        source: the opened checkpoint.
        backend: where the new one is written.
        final: its absolute path.
        settings: how the source is verified, and the new one is written.
        info: what the manifest says of it.
        parts: names of the checkpointables; None: all.
        replace: whether a checkpoint there is replaced.
        progress: called with numbers of bytes as they are written.

    Raises:
        CorruptCheckpointError: bytes of the source are not what was saved; nothing is left of the copy.
        StorageError: a file system refused.
    """
    transaction = Transaction(backend, final, settings)
    with _removed_on_error(transaction):
        segments: list[SegmentRecord] = []
        records = []
        for part in source.manifest.parts:
            if parts is None or part.name in parts:
                records.append(_copy_part(files, source, part, backend, transaction, segments, settings, progress))
        manifest = Manifest(
            FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, tuple(segments), tuple(records), dict(info)
        )
        return transaction.commit(manifest, replace=replace)


@contextlib.contextmanager
def _removed_on_error(transaction: Transaction) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        try:
            transaction.abort()
        except StorageError as second:
            error.add_note(f"and the attempt {transaction.directory} could not be removed: {second}")
        raise


def _copy_part(
    files: Opener,
    source: Committed,
    part: PartRecord,
    backend: Backend,
    transaction: Transaction,
    segments: list[SegmentRecord],
    settings: StoreSettings,
    progress: Progress | None,
) -> PartRecord:
    transaction.add_folder(part.name)
    arrays = [_source_of(files, source, array, settings) for array in part.arrays]
    written = write_arrays(
        backend, transaction.directory, part.name, arrays, settings, first_segment=len(segments), progress=progress
    )
    segments.extend(written.segments)
    copied = _copy_files(files, source, part, transaction, settings, progress)
    return PartRecord(part.name, part.kind, written.arrays, copied, part.detail)


def _source_of(files: Opener, source: Committed, array: ArrayRecord, settings: StoreSettings) -> ArraySource:
    dtype = DTYPES[array.dtype]

    def read(box: Box, target: np.ndarray) -> None:
        read_box(files, source, array, box, target, settings)

    chunks = [ChunkSource(box, _BoxToCome(box, dtype, read)) for box in chunk_boxes(array.shape, dtype.itemsize)]
    return ArraySource(array.name, array.shape, dtype, chunks, None)


def chunk_boxes(shape: Sequence[int], itemsize: int, most: int = CHUNK_BYTES) -> list[Box]:
    """An array in boxes of at most `most` bytes, cut along its first axes; none of an array without elements."""
    if not math.prod(shape):
        return []
    return list(cut_box(full_box(shape), itemsize, most))


def _copy_files(
    files: Opener,
    source: Committed,
    part: PartRecord,
    transaction: Transaction,
    settings: StoreSettings,
    progress: Progress | None,
) -> tuple[FileRecord, ...]:
    copied = []
    folders = {part.name}
    for record in part.files:
        folder = record.file.rpartition("/")[0]
        for depth in range(2, folder.count("/") + 2):
            inner = "/".join(folder.split("/")[:depth])
            if inner not in folders:
                folders.add(inner)
                transaction.add_folder(inner)
        digest = source.manifest.digest if settings.verify_on_load and record.digests else None
        data = read_recorded(files, source.directory, record, digest, source.manifest.block_bytes)
        copied.append(transaction.write_file(record.file, bytes(memoryview(data))))
        if progress is not None:
            progress(record.bytes)
    return tuple(copied)
