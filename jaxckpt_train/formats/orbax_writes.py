"""Writes arrays as Orbax has them, through TensorStore: many small ones together, large ones in pieces."""

from __future__ import annotations

import collections
import errno
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train.errors import MismatchError, StorageError
from jaxckpt_train.formats.tensorstore_calls import refused, tensorstore
from jaxckpt_train.store.boxes import Box, box_shape, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord, shown
from jaxckpt_train.store.reader import Progress

CHUNK_BYTES = 64 << 20
AHEAD_BYTES = 256 << 20
"""So much of the arrays is on its way to the disk at a time."""
BATCH_BYTES = 16 << 20
"""So much of small arrays becomes one commit. One of each would be files and a rewritten index of its own."""
_LEAF_BYTES = 4 << 10  # what a batch holds of each array beside its data, about
_WRITE = "write through TensorStore"
# TensorStore's own settings for a database that one process writes at a time, as Orbax has them.
_DATABASE = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}


class ToWrite(NamedTuple):
    """The data of a leaf: its path, its name in the files, and what it is read from: an array, or a number."""

    path: str
    name: str
    content: ArrayRecord | np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Of numpy."""
        return DTYPES[self.content.dtype] if isinstance(self.content, ArrayRecord) else self.content.dtype

    @property
    def nbytes(self) -> int:
        """Uncompressed."""
        return math.prod(self.content.shape) * self.dtype.itemsize


def write_arrays(
    directory: str,
    arrays: Iterable[ToWrite],
    *,
    subject: str,
    read: Callable[[ArrayRecord, Box], np.ndarray],
    compressed: bool,
    ahead_bytes: int,
    progress: Progress | None,
) -> dict[str, list[int]]:
    """Write the data of all leaves.

    Args:
        directory: of the item; when this returns or raises, nothing is written into it any more.
        arrays: what to write.
        subject: the checkpoint, for errors.
        read: gives a piece of an array.
        compressed: by zstd.
        ahead_bytes: at most so much is held that is not on the disk yet, beside the piece that is read.
        progress: called with numbers of bytes as they are written.

    Returns:
        The shapes of the chunks by leaf path.

    Raises:
        MismatchError: TensorStore has nothing for such an array.
        SettingsError: TensorStore is not installed.
        StorageError: the file system refused.
    """
    ts = tensorstore("export: what Orbax reads is written")
    context = ts.Context({"file_io_concurrency": {"limit": 16}})
    shapes: dict[str, list[int]] = {}
    with _Writes(directory, ts.Transaction, ahead_bytes, progress) as writes:
        for array in arrays:
            boxes = list(cut_box(full_box(array.content.shape), array.dtype.itemsize, CHUNK_BYTES))
            shapes[array.path] = list(box_shape(boxes[0]))
            batch = writes.batch(array.nbytes)
            try:
                spec = _spec(directory, array, shapes[array.path], compressed)
                store = ts.open(spec, context=context, create=True, transaction=batch).result()
            except (ValueError, OSError) as error:
                told = f"{subject}: leaf {array.path!r} of {array.dtype.name}: {shown(error)}"
                raise refused(error, _WRITE, directory) or MismatchError(told) from error
            for box in boxes:
                data = array.content if isinstance(array.content, np.ndarray) else read(array.content, box)
                part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
                if batch is not None:
                    _result(directory, part.write(data).copy)
                    continue
                writes.make_room(data.nbytes)
                writes.add(data.nbytes, data.nbytes, part.write(data).commit)
    return shapes


class _Writes:
    """Writes of TensorStore that are on their way; at the end, also by an error, none is.

    Args:
        directory: what is written into, for errors.
        transaction: makes a new transaction of TensorStore.
        ahead_bytes: so much is held at a time.
        progress: is told of what was written.
    """

    def __init__(
        self, directory: str, transaction: Callable[[], Any], ahead_bytes: int, progress: Progress | None
    ) -> None:
        self._directory, self._transaction, self._progress = directory, transaction, progress
        self._waiting: collections.deque[tuple[int, int, Any]] = collections.deque()
        self._most = self._left = ahead_bytes
        self._batch_bytes = min(BATCH_BYTES, ahead_bytes // 4)
        self._batch: Any = None
        self._in_batch = self._held_by_batch = 0

    def __enter__(self) -> _Writes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._commit()
                while self._waiting:
                    self._settle_oldest()
        finally:  # after an error: what is still written would come into a directory that is being removed
            if self._batch is not None:
                self._batch.abort()
            for *_, future in self._waiting:
                future.exception()

    def batch(self, nbytes: int) -> Any:
        """The transaction into which an array of so many bytes goes, at once; None: it is too large for one."""
        held = nbytes + _LEAF_BYTES
        if held > self._batch_bytes:
            return None
        if self._held_by_batch + held > self._batch_bytes:
            self._commit()
        self.make_room(held)
        if self._batch is None:
            self._batch = self._transaction()
        self._in_batch += nbytes
        self._held_by_batch += held
        self._left -= held
        return self._batch

    def make_room(self, nbytes: int) -> None:
        """Wait until so many bytes more may be held; raises StorageError if a write has failed."""
        while self._left < min(self._most, nbytes):
            if not self._waiting:
                self._commit()
            self._settle_oldest()

    def add(self, held: int, nbytes: int, future: Any) -> None:
        """A write of so many bytes has begun, for which so many are held until it has ended."""
        self._waiting.append((held, nbytes, future))
        self._left -= held

    def _commit(self) -> None:
        if self._batch is not None:
            self._left += self._held_by_batch
            self.add(self._held_by_batch, self._in_batch, self._batch.commit_async())
            self._batch, self._in_batch, self._held_by_batch = None, 0, 0

    def _settle_oldest(self) -> None:
        held, nbytes, future = self._waiting[0]
        _result(self._directory, future)
        self._waiting.popleft()
        self._left += held
        if self._progress is not None:
            self._progress(nbytes)


def _result(directory: str, future: Any) -> None:
    try:
        future.result()
    except (ValueError, OSError) as error:
        raise refused(error, _WRITE, directory) or StorageError(
            errno.EIO, f"TensorStore: {shown(error)}", directory
        ) from error


def _spec(directory: str, array: ToWrite, chunk: Sequence[int], compressed: bool) -> dict[str, Any]:
    database = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "path": f"{array.name}/" if array.name else "",  # a tree that is one array
        "config": _DATABASE,
    }
    compressor = {"id": "zstd", "level": 1} if compressed else None
    metadata = {
        "shape": list(array.content.shape),
        "chunks": [max(1, size) for size in chunk],
        "compressor": compressor,
    }
    options = {"store_data_equal_to_fill_value": True, "dtype": array.dtype.name}
    return {"driver": "zarr", "kvstore": database, "metadata": metadata, **options}
