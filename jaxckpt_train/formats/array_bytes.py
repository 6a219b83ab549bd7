"""The bytes of an array that something else holds, box by box, as if they lay in a segment."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.formats.held_pieces import HeldPieces
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, row_major_range
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.segment import ALIGNMENT

Read = Callable[[Box, np.ndarray], None]
"""Fills a row-major array with what lies in a box."""


def grid_boxes(shape: Sequence[int], chunk_shape: Sequence[int]) -> list[Box]:
    """The boxes of a regular grid over an array, in row-major order; those at the ends may be smaller.

    An array without elements has none.
    """
    if not math.prod(shape):
        return []  # though one of its axes may have very many places
    cuts = [
        [(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(shape, chunk_shape, strict=True)
    ]
    return [tuple(box) for box in itertools.product(*cuts)]


def chunks_in_a_row(boxes: Sequence[Box], itemsize: int, segment: int) -> tuple[ChunkRecord, ...]:
    """The records of chunks that `ArrayBytes` gives: each begins a page, so that no read touches two without need."""
    records, at = [], 0
    for box in boxes:
        length = box_elements(box) * itemsize
        records.append(ChunkRecord(box, segment, at, length, ""))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(records)


def record_of(name: str, shape: Sequence[int], dtype: str, chunks: tuple[ChunkRecord, ...]) -> ArrayRecord:
    """The record of an array, without chunks where it has no elements."""
    return ArrayRecord(name, tuple(shape), dtype, chunks if math.prod(shape) else ())


def size_of(chunks: Sequence[ChunkRecord]) -> int:
    """How many bytes a segment of such chunks has."""
    return chunks[-1].offset + chunks[-1].length if chunks else 0


class ArrayBytes:
    """A source of the chunks of one array, each read when it is asked for.

    Args:
        name: of the array, for messages.
        dtype: of its elements.
        chunks: as `chunks_in_a_row` places them.
        read: reads a box of it; called from several threads.
        held: where it costs as much to read a part of a chunk as all of it: keeps those that were read for a part,
            while others may be asked for; the same at each opening.
    """

    alignment = 1

    def __init__(
        self, name: str, dtype: np.dtype, chunks: Sequence[ChunkRecord], read: Read, held: HeldPieces | None = None
    ) -> None:
        self._name, self._dtype, self._chunks, self._read = name, dtype, chunks, read
        self._starts = [chunk.offset for chunk in chunks]
        self.size = size_of(chunks)
        self._held = held

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`: what lies between chunks stays as it is."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        for chunk, low, high in self._touched(offset, offset + needed):
            self._read_part(chunk, low - chunk.offset, data[low - offset : high - offset])

    def close(self) -> None:
        """It holds no file."""

    def _touched(self, start: int, stop: int) -> Iterator[tuple[ChunkRecord, int, int]]:
        """The chunks with bytes between these two, and which bytes."""
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._chunks)):
            chunk = self._chunks[index]
            low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
            if chunk.offset >= stop:
                return
            if low < high:
                yield chunk, low, high

    def _read_part(self, chunk: ChunkRecord, skipped: int, target: np.ndarray) -> None:
        """Read whole elements, whose bytes begin `skipped` after the first of the chunk."""
        if self._held is not None and len(target) < chunk.length:
            whole = self._held.get(chunk.offset, self._name, chunk.length, functools.partial(self._read_whole, chunk))
            target[:] = whole[skipped : skipped + len(target)]
            return
        itemsize = self._dtype.itemsize
        elements, at = target.view(self._dtype), 0
        first = skipped // itemsize
        for box in row_major_range(chunk.box, first, first + len(elements)):
            count = box_elements(box)
            self._read(box, elements[at : at + count].reshape(box_shape(box)))
            at += count

    def _read_whole(self, chunk: ChunkRecord) -> np.ndarray:
        content = np.empty(chunk.length, np.uint8)
        self._read(chunk.box, content.view(self._dtype).reshape(box_shape(chunk.box)))
        return content
