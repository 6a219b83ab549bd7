"""Reads arrays of opened checkpoints piece by piece, on other threads, ahead of who looks at them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.opened import Opened
from jaxckpt_train.store.box_to_come import BoxToCome
from jaxckpt_train.store.boxes import Box, box_elements, cut_box, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_ahead import BoxAhead, ReadAhead

PIECE_BYTES = 16 << 20
KNOWN = 1024  # pieces that are known before they are wanted: small ones are read together with those that come next
AT_ONCE = 4  # reads of each checkpoint


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
    short keep several threads waiting for each other. Who lets go of an array before the next comes has its memory
    used again; together they take the read budget, and small ones some megabytes beside it.

    Raises:
        CorruptCheckpointError: bytes are not what was saved.
        StorageError: they cannot be read.
        CheckpointTimeoutError: a disk does not answer.
    """
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(_ahead_of(each, len(opened))) for each in opened]
        known: deque[tuple[Wanted, list[BoxAhead]]] = deque()
        for each in wanted:
            boxes = zip(aheads, opened, each.arrays, strict=True)
            known.append((each, [_box_ahead(ahead, one, array, each.box) for ahead, one, array in boxes]))
            if len(known) > KNOWN:
                yield _fetched(*known.popleft())
        while known:
            yield _fetched(*known.popleft())


def _ahead_of(opened: Opened, count: int) -> ReadAhead:
    return ReadAhead(opened.settings.read_budget_bytes // count, opened.path, AT_ONCE)


def _box_ahead(ahead: ReadAhead, opened: Opened, array: ArrayRecord, box: Box) -> BoxAhead:
    return ahead.of([BoxToCome(opened.files, opened.committed, array, box, opened.settings)])[0]


def _fetched(wanted: Wanted, boxes: list[BoxAhead]) -> tuple[Wanted, list[np.ndarray]]:
    return wanted, [box.fetch() for box in boxes]
