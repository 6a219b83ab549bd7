"""Reads arrays of opened checkpoints piece by piece, on other threads, ahead of who looks at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxckpt_train.opened import Opened
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import read_box
from jaxckpt_train.store.staging import empty_array

PIECE_BYTES = 16 << 20
AHEAD = 6  # pieces that are being read, wait, or are looked at, at a time
READERS = 4


class Wanted(NamedTuple):
    """A box of an array, of each of one or two checkpoints."""

    name: str
    box: Box
    arrays: Sequence[ArrayRecord]

    @property
    def nbytes(self) -> int:
        """Of all that is read for it."""
        return box_elements(self.box) * sum(DTYPES[array.dtype].itemsize for array in self.arrays)


def pieces_of(name: str, arrays: Sequence[ArrayRecord]) -> Iterator[Wanted]:
    """The pieces of an array, or of two of the same shape."""
    shape, itemsize = arrays[0].shape, max(DTYPES[array.dtype].itemsize for array in arrays)
    for box in cut_box(full_box(shape), itemsize, PIECE_BYTES):
        if box_elements(box):
            yield Wanted(name, box, arrays)


def over_pieces(opened: Sequence[Opened], wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, list[np.ndarray]]]:
    """Each piece, in the order given, with an array of each of the checkpoints.

    Other threads read ahead; what is to be done with a piece is for the caller's thread alone: calls of numpy that are
    short keep several threads waiting for each other. The arrays are read into again when the next piece is asked for.

    Raises:
        CorruptCheckpointError: bytes are not what was saved.
        StorageError: they cannot be read.
    """

    def read(each: Wanted, memory: _Memory) -> list[np.ndarray]:
        arrays = zip(opened, each.arrays, strict=True)
        return [_read(one, array, each.box, memory, place) for place, (one, array) in enumerate(arrays)]

    free = [_Memory() for _ in range(AHEAD)]
    with ThreadPoolExecutor(READERS, thread_name_prefix="jaxckpt-look") as pool:
        waiting: deque[tuple[Wanted, _Memory, Future[list[np.ndarray]]]] = deque()
        try:
            for each in wanted:
                memory = free.pop()
                waiting.append((each, memory, pool.submit(read, each, memory)))
                if not free:
                    first, memory, future = waiting.popleft()
                    yield first, future.result()
                    free.append(memory)
            for first, _, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Memory:
    """Memory that is used again: fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self._all: dict[int, np.ndarray] = {}

    def bytes(self, place: int, size: int) -> np.ndarray:
        """So many bytes, other ones for each place."""
        found = self._all.get(place)
        if found is None or found.size < size:
            self._all[place] = found = empty_array((size,), np.dtype(np.uint8))
        return found[:size]


def _read(opened: Opened, array: ArrayRecord, box: Box, memory: _Memory, place: int) -> np.ndarray:
    dtype = DTYPES[array.dtype]
    data = memory.bytes(place, box_elements(box) * dtype.itemsize)
    read_box(opened.files, opened.committed, array, box, data, opened.settings)
    return data.view(dtype).reshape(box_shape(box))
