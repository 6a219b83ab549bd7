"""Copies an opened checkpoint, of whatever origin, into a new one: array by array, with little of it in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.box_to_come import BoxToCome
from jaxckpt_train.store.boxes import Box, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.kept_chunks import kept_boxes
from jaxckpt_train.store.layout import ArraySource, ChunkSource, alignment_class
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    WHOLE_CHUNKS,
    ArrayRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.plain_files import read_recorded
from jaxckpt_train.store.read_ahead import ReadAhead
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.transaction import Committed, Transaction
from jaxckpt_train.store.writer import write_arrays

CHUNK_BYTES = 256 << 20
"""A larger array is copied in chunks of at most so many bytes, each of which is in memory at a time."""
MOST_CHUNKS = 1 << 20


def copy_checkpoint(
    files: Opener,
    source: Committed,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    info: Mapping[str, Any],
    if_taken: str,
    parts: Sequence[str] | None = None,
    replace: bool = False,
    keep_chunks: bool = False,
    decoding: int = 0,
    check: Callable[[str], object] = lambda directory: None,
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
        if_taken: what is to be done if something gets that path meanwhile, for the error.
        parts: names of the checkpointables; None: all.
        replace: whether a checkpoint there is replaced.
        keep_chunks: whether arrays are in the same chunks as in the source, but for very large ones.
        decoding: how many times its size reading an array of the source takes beside that, as of `Opened`.
        check: called with the directory in which all is written and committed, before that gets its name; what it
            raises is raised, and nothing is left of the copy.
        progress: called with numbers of bytes as they are written.

    Raises:
        CorruptCheckpointError: bytes of the source are not what was saved; nothing is left of the copy.
        CheckpointExistsError: something has got that path meanwhile, and `replace` is false.
        UnsupportedLeafError: an array is larger than any that is copied.
        MismatchError: a value of the source does not fit what an operation makes of it; nothing is left of the copy.
        StorageError: a file system refused.
    """
    checked: list[str] = []

    def check_once() -> None:  # it is called again if what was published has to be taken back
        if not checked:
            check(transaction.directory)
            checked.append(transaction.directory)

    transaction = Transaction(backend, final, settings, check_once)
    with _removed_on_error(transaction):
        segments: list[SegmentRecord] = []
        copier = _Copier(files, source, backend, transaction, settings, keep_chunks, decoding, progress)
        wanted = [part for part in source.manifest.parts if parts is None or part.name in parts]
        records = [copier.copy_part(part, segments) for part in wanted]
        manifest = Manifest(
            FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, tuple(segments), tuple(records), dict(info)
        )
        return transaction.commit(manifest, replace=replace, if_taken=if_taken)


@contextlib.contextmanager
def _removed_on_error(transaction: Transaction) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        transaction.abort_after(error)
        raise


@dataclasses.dataclass(frozen=True)
class _Copier:
    """Copies one checkpointable after the other."""

    files: Opener
    source: Committed
    backend: Backend
    transaction: Transaction
    settings: StoreSettings
    keep_chunks: bool
    decoding: int
    progress: Progress | None

    def copy_part(self, part: PartRecord, segments: list[SegmentRecord]) -> PartRecord:
        """Copy one; its segments are added to those that there are."""
        self.transaction.add_folder(part.name)
        budget = self.settings.read_budget_bytes
        with ReadAhead(budget, self.source.directory, decoding=self.decoding) as ahead:
            written = write_arrays(
                self.backend,
                self.transaction.directory,
                part.name,
                self._sources_of(part, ahead),
                self.settings,
                first_segment=len(segments),
                progress=self.progress,
                give_up=ahead.give_up,
            )
        segments.extend(written.segments)
        return PartRecord(part.name, part.kind, written.arrays, tuple(self._copy_files(part)), part.detail)

    def _sources_of(self, part: PartRecord, ahead: ReadAhead) -> list[ArraySource]:
        """The arrays, whose boxes are read in the order in which they are written."""
        found = []
        for array in part.arrays:
            boxes = self._boxes_of(array)
            to_come = ahead.of([BoxToCome(self.files, self.source, array, box, self.settings) for box in boxes])
            chunks = [ChunkSource(*each) for each in zip(boxes, to_come, strict=True)]
            found.append(ArraySource(array.name, array.shape, DTYPES[array.dtype], chunks, array.sharding))
        ahead.order(lambda box: alignment_class(box.nbytes))
        return found

    def _boxes_of(self, array: ArrayRecord) -> list[Box]:
        itemsize = DTYPES[array.dtype].itemsize
        if self.keep_chunks:
            return kept_boxes(array, itemsize, CHUNK_BYTES)
        if self.source.manifest.block_bytes >= WHOLE_CHUNKS:
            return [chunk.box for chunk in array.chunks]  # each can only be read whole
        return chunk_boxes(array.shape, itemsize, f"{self.source.directory}: array {array.name!r}")

    def _copy_files(self, part: PartRecord) -> Iterator[FileRecord]:
        folders = {part.name}
        manifest = self.source.manifest
        for record in part.files:
            folder = record.file.rpartition("/")[0]
            for depth in range(2, folder.count("/") + 2):
                inner = "/".join(folder.split("/")[:depth])
                if inner not in folders:
                    folders.add(inner)
                    self.transaction.add_folder(inner)
            digest = manifest.digest if self.settings.verify_on_load and record.digests else None
            data = read_recorded(self.files, self.source.directory, record, digest, manifest.block_bytes)
            yield self.transaction.write_file(record.file, bytes(memoryview(data)))
            if self.progress is not None:
                self.progress(record.bytes)


def chunk_boxes(shape: Sequence[int], itemsize: int, subject: str, most: int = CHUNK_BYTES) -> list[Box]:
    """An array in boxes of at most `most` bytes, cut along its first axes; none of an array without elements.

    Raises:
        UnsupportedLeafError: it would be millions; the message begins with `subject`.
    """
    total = math.prod(shape) * itemsize
    if not total:
        return []
    if total > most * MOST_CHUNKS:
        raise UnsupportedLeafError(f"{subject}: {total:,} bytes, expected at most {most * MOST_CHUNKS:,} to be copied")
    return list(cut_box(full_box(shape), itemsize, most))
