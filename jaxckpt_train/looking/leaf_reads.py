"""Reads arrays of opened checkpoints piece by piece, and has what is read looked at, on several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from jaxckpt_train.opened import Opened
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import read_box

PIECE_BYTES = 32 << 20
AHEAD = 4  # pieces that are being read, or looked at, at a time
Result = TypeVar("Result")


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


Use = Callable[[Wanted, Sequence[np.ndarray]], Result]


def over_pieces(
    opened: Sequence[Opened], wanted: Iterable[Wanted], use: Use[Result]
) -> Iterator[tuple[Wanted, Result]]:
    """What `use` makes of each piece, in the order given.

    `use` is called on several threads, with an array of each of the checkpoints, whose memory is used again afterwards.

    Raises:
        CorruptCheckpointError: bytes are not what was saved.
        StorageError: they cannot be read.
    """
    kept = _Kept()

    def used(each: Wanted) -> Result:
        arrays = zip(opened, each.arrays, strict=True)
        return use(each, [_read(one, array, each.box, kept, place) for place, (one, array) in enumerate(arrays)])

    with ThreadPoolExecutor(AHEAD, thread_name_prefix="jaxckpt-look") as pool:
        waiting: deque[tuple[Wanted, Future[Result]]] = deque()
        try:
            for each in wanted:
                waiting.append((each, pool.submit(used, each)))
                if len(waiting) > AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Kept(threading.local):
    """Memory of a thread that is used again: fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self._all: dict[int, np.ndarray] = {}

    def bytes(self, place: int, size: int) -> np.ndarray:
        """So many bytes, other ones for each place."""
        found = self._all.get(place)
        if found is None or found.size < size:
            self._all[place] = found = np.empty(size, np.uint8)
        return found[:size]


def _read(opened: Opened, array: ArrayRecord, box: Box, kept: _Kept, place: int) -> np.ndarray:
    dtype = DTYPES[array.dtype]
    data = kept.bytes(place, box_elements(box) * dtype.itemsize)
    read_box(opened.files, opened.committed, array, box, data, opened.settings)
    return data.view(dtype).reshape(box_shape(box))
