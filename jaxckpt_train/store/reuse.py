"""Segments of the checkpoint before that a save takes over, because nothing in them has changed.

A segment is taken over as a whole, by a second name of its file, so every checkpoint stays complete by itself. Arrays
that tend to stay as they are get segments of their own: a data file holds exactly the tensors of its checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, ChunkRecord, HexDigest, SegmentRecord, block_digests
from jaxckpt_train.store.segment import ArraySource, ChunkSource, dtype_name, fetched_bytes, flat_bytes
from jaxckpt_train.store.timeouts import report_progress

APART_BYTES = 256 << 20
"""The size of segments of unchanged arrays: one array that changes makes all of its segment be written."""
MIN_APART_BYTES = 1 << 20
"""Fewer bytes of unchanged arrays are not worth a file of their own."""
MIN_APART_SHARE = 64
"""Nor is less than this part of what a process writes."""


@dataclasses.dataclass(frozen=True)
class WrittenBefore:
    """What this process wrote of one checkpointable in the newest committed checkpoint.

    Attributes:
        directory: of that checkpoint.
        segments: by their numbers in the chunks of `arrays`.
        arrays: by name, with the chunks of this process.
        steady: names of arrays that had these bytes in the checkpoint before it, too.
        is_restored: it was restored, so that each of its arrays may still be as it was.
    """

    directory: str
    segments: Mapping[int, SegmentRecord]
    arrays: Mapping[str, ArrayRecord]
    steady: frozenset[str] = frozenset()
    is_restored: bool = False

    def settled(self, same: frozenset[str]) -> frozenset[str]:
        """Those of the arrays that are the same whose segments will be taken over: nothing else is in them."""
        moving = {chunk.segment for array in self.arrays.values() if array.name not in same for chunk in array.chunks}
        kept = (name for name in same if name in self.arrays)
        return frozenset(n for n in kept if all(chunk.segment not in moving for chunk in self.arrays[n].chunks))


class Unchanged(NamedTuple):
    """What is known of the arrays of one checkpointable before a save.

    Attributes:
        before: what this process wrote last; None: nothing.
        same: names of arrays that have the bytes of before, for certain.
        frozen: names of arrays that never change, by what the user says.
    """

    before: WrittenBefore | None = None
    same: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()


NOTHING_KNOWN = Unchanged()


class Found(NamedTuple):
    """A chunk of now, and its record of before."""

    array: int
    chunk: int
    record: ChunkRecord


class Candidate(NamedTuple):
    """A segment of before that can be taken over if its arrays have not changed."""

    segment: SegmentRecord
    chunks: Sequence[Found]


class Sources:
    """The arrays that a process saves, while it is open which of their chunks it writes."""

    def __init__(self, arrays: Sequence[ArraySource], known: Unchanged, digest: HexDigest) -> None:
        self._arrays, self._known, self._digest = arrays, known, digest
        self._changed: set[str] = set()
        self._taken: dict[int, set[int]] = defaultdict(set)  # numbers of chunks, by array
        self._fetched: dict[int, dict[int, np.ndarray]] = defaultdict(dict)  # which cannot be fetched again

    def candidates(self) -> list[Candidate]:
        """The segments of before whose chunks are all there again, each of an array that is the same or was steady."""
        before, same, frozen = self._known
        if before is None:
            return []
        hopeful = before.arrays.keys() if before.is_restored else (same | frozen | before.steady) & before.arrays.keys()
        if not hopeful:
            return []
        found: dict[int, list[Found]] = defaultdict(list)
        for index, array in enumerate(self._arrays):
            if array.name in hopeful:
                record = before.arrays[array.name]
                if (record.shape, record.dtype) == (array.shape, dtype_name(array.dtype)):
                    numbers = {source.box: number for number, source in enumerate(array.chunks)}
                    for chunk in record.chunks:
                        if chunk.box in numbers:
                            found[chunk.segment].append(Found(index, numbers[chunk.box], chunk))
        sizes = Counter(chunk.segment for array in before.arrays.values() for chunk in array.chunks)
        return [Candidate(before.segments[each], some) for each, some in found.items() if len(some) == sizes[each]]

    def is_same(self, candidate: Candidate) -> bool:
        """Whether nothing in the segment has changed. It reads the arrays that are not known to be the same."""
        for index, number, record in candidate.chunks:
            array = self._arrays[index]
            if array.name in self._known.same:
                continue
            data = flat_bytes(array.chunks[number])
            if data is None:
                data = self._fetched[index][number] = fetched_bytes(array.chunks[number])
            if block_digests(data, BLOCK_BYTES, self._digest) != record.digests:
                self._changed.add(array.name)
                return False
            report_progress()
        return True

    def take(self, candidate: Candidate) -> None:
        """Leave the chunks of this segment out of what is written."""
        for index, number, _ in candidate.chunks:
            self._taken[index].add(number)
            self._fetched[index].pop(number, None)

    def divided(self) -> tuple[Sequence[ArraySource], Sequence[ArraySource]]:
        """What is left to write: arrays that get segments of their own, and the others; each in its place, or empty."""
        before, same, frozen = self._known
        steady = (same | frozen | (frozenset() if before is None else before.steady)) - self._changed
        if not steady and not self._fetched:
            return (), self._arrays
        left = [self._left(index, array) for index, array in enumerate(self._arrays)]
        sizes = [sum(chunk.data.nbytes for chunk in array.chunks) for array in left]
        is_apart = [array.name in steady and size > 0 for array, size in zip(left, sizes, strict=True)]
        apart_bytes = sum(itertools.compress(sizes, is_apart))
        if apart_bytes < max(MIN_APART_BYTES, sum(sizes) // MIN_APART_SHARE):
            is_apart = [array.name in frozen for array in left]
        pairs = list(zip(left, is_apart, strict=True))
        apart = [array if yes else array._replace(chunks=()) for array, yes in pairs]
        return apart, [array._replace(chunks=()) if yes else array for array, yes in pairs]

    def _left(self, index: int, array: ArraySource) -> ArraySource:
        taken, fetched = self._taken.get(index, ()), self._fetched.get(index)
        if not taken and not fetched:
            return array
        chunks = list(array.chunks)
        for number, data in (fetched or {}).items():
            box = chunks[number].box
            chunks[number] = ChunkSource(box, data.view(array.dtype).reshape(box_shape(box)))
        return array._replace(chunks=tuple(each for number, each in enumerate(chunks) if number not in taken))


def steady_arrays(before: WrittenBefore | None, arrays: Sequence[ArrayRecord]) -> frozenset[str]:
    """The names of arrays that have the same bytes as before."""
    if before is None:
        return frozenset()
    pairs = ((before.arrays.get(array.name), array) for array in arrays if array.chunks)
    return frozenset(now.name for was, now in pairs if was is not None and _is_equal(was, now))


def _is_equal(was: ArrayRecord, now: ArrayRecord) -> bool:
    if (was.shape, was.dtype, len(was.chunks)) != (now.shape, now.dtype, len(now.chunks)):
        return False
    digests = {chunk.box: chunk.digests for chunk in was.chunks}
    return all(digests.get(chunk.box) == chunk.digests for chunk in now.chunks)
