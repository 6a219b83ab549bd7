"""Reads arrays of opened checkpoints piece by piece, the next ones on other threads meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxckpt_train.looking.opening import Opened
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import read_box

PIECE_BYTES = 32 << 20
AHEAD = 4  # pieces that are being read, or wait, at a time


class Wanted(NamedTuple):
    """A box of an array, of each of one or two checkpoints."""

    name: str
    box: Box
    arrays: Sequence[ArrayRecord]


def pieces_of(name: str, arrays: Sequence[ArrayRecord]) -> Iterator[Wanted]:
    """The pieces of an array, or of two of the same shape."""
    shape, itemsize = arrays[0].shape, max(DTYPES[array.dtype].itemsize for array in arrays)
    for box in cut_box(full_box(shape), itemsize, PIECE_BYTES):
        if box_elements(box):
            yield Wanted(name, box, arrays)


def read_pieces(opened: Sequence[Opened], wanted: Iterator[Wanted]) -> Iterator[tuple[Wanted, list[np.ndarray]]]:
    """What lies in each piece, in the order given: an array of each of the checkpoints.

    Raises:
        CorruptCheckpointError: bytes are not what was saved.
        StorageError: they cannot be read.
    """
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="jaxckpt-look") as pool:
        waiting: list[tuple[Wanted, list[Future[np.ndarray]]]] = []
        try:
            for each in wanted:
                futures = [
                    pool.submit(_read, one, array, each.box) for one, array in zip(opened, each.arrays, strict=True)
                ]
                waiting.append((each, futures))
                if len(waiting) >= AHEAD:
                    first, taken = waiting.pop(0)
                    yield first, [future.result() for future in taken]
            while waiting:
                first, taken = waiting.pop(0)
                yield first, [future.result() for future in taken]
        finally:
            pool.shutdown(cancel_futures=True)


def _read(opened: Opened, array: ArrayRecord, box: Box) -> np.ndarray:
    data = np.empty(box_shape(box), DTYPES[array.dtype])
    read_box(opened.files, opened.committed, array, box, data.reshape(-1).view(np.uint8), opened.settings)
    return data
