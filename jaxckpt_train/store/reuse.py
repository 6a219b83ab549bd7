"""Segments of the checkpoint before that a save takes over, because nothing in them has changed.

A segment is taken over as a whole, by a second name of its file, so every checkpoint stays complete by itself. Arrays
that tend to stay as they are get segments of their own: a data file holds exactly the tensors of its checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    HEX_DIGITS,
    ArrayRecord,
    ChunkRecord,
    SegmentRecord,
    digest_function,
)
from jaxckpt_train.store.segment import ArraySource, ChunkSource, dtype_name, fetched_bytes, flat_bytes
from jaxckpt_train.store.threads import Workers
from jaxckpt_train.store.timeouts import report_progress

APART_BYTES = 256 << 20
"""The size of segments of unchanged arrays: one array that changes makes all of its segment be written."""
MIN_APART_BYTES = 1 << 20
"""Fewer bytes of unchanged arrays are not worth a file of their own."""
MIN_APART_SHARE = 64
"""Nor is less than this part of what a process writes."""
MIN_COMPARED_BYTES = 64 << 10
"""Smaller arrays are not compared before they are written."""


@dataclasses.dataclass(frozen=True)
class WrittenBefore:
    """What this process wrote of one checkpointable in the newest committed checkpoint.

    Attributes:
        directory: of that checkpoint.
        segments: by their numbers in the chunks of `arrays`.
        arrays: by name, with the chunks of this process.
        steady: names of arrays that had these bytes in the checkpoint before it, too; None: that is not known.
        taken: numbers of the segments that were taken over, so that the storage has shown that it can do it.
    """

    directory: str
    segments: Mapping[int, SegmentRecord]
    arrays: Mapping[str, ArrayRecord]
    steady: frozenset[str] | None = None
    taken: frozenset[int] = frozenset()

    def settled(self, same: frozenset[str]) -> frozenset[str]:
        """Those of the arrays that are the same whose segments will be taken over again: nothing else is in them."""
        moving = {chunk.segment for array in self.arrays.values() if array.name not in same for chunk in array.chunks}
        staying, kept = self.taken - moving, (name for name in same if name in self.arrays)
        return frozenset(name for name in kept if all(chunk.segment in staying for chunk in self.arrays[name].chunks))


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


class _Block(NamedTuple):
    name: str  # of the array
    data: np.ndarray
    digest: str  # of before


class Sources:
    """The arrays that a process saves, while it is open which of their chunks it writes.

    `workers` compare digests.
    """

    def __init__(self, arrays: Sequence[ArraySource], known: Unchanged, digest: str, workers: Workers) -> None:
        self._arrays, self._known, self._workers = arrays, known, workers
        self._digest, self._width = digest_function(digest), HEX_DIGITS[digest]
        before, same, frozen = known
        self._steady = same | frozen | ((before and before.steady) or frozenset())
        self._taken: dict[int, set[int]] = defaultdict(set)  # numbers of chunks, by array
        self._fetched: dict[int, dict[int, np.ndarray]] = defaultdict(dict)  # which cannot be fetched again

    def candidates(self) -> list[Candidate]:
        """The segments of before whose chunks are all there again, each of an array that may have stayed the same."""
        before = self._known.before
        if before is None or (before.steady is not None and not self._steady):
            return []
        found: dict[int, list[Found]] = defaultdict(list)
        for index, array in enumerate(self._arrays):
            if before.steady is None or array.name in self._steady:
                for each in self._found(index, array):
                    found[each.record.segment].append(each)
        sizes = Counter(chunk.segment for array in before.arrays.values() for chunk in array.chunks)
        return [Candidate(before.segments[each], some) for each, some in found.items() if len(some) == sizes[each]]

    def _found(self, index: int, array: ArraySource) -> list[Found]:
        """The chunks that were there before."""
        before = self._known.before
        record = None if before is None else before.arrays.get(array.name)
        if record is None or (record.shape, record.dtype) != (array.shape, dtype_name(array.dtype)):
            return []
        numbers = {source.box: number for number, source in enumerate(array.chunks)}
        return [Found(index, numbers[chunk.box], chunk) for chunk in record.chunks if chunk.box in numbers]

    def is_same(self, candidate: Candidate) -> bool:
        """Whether nothing in the segment has changed. It reads the arrays that are not known to be the same."""
        unknown = [each for each in candidate.chunks if self._arrays[each.array].name not in self._known.same]
        blocks, elsewhere = list[_Block](), list[Found]()
        for each in unknown:
            data = flat_bytes(self._arrays[each.array].chunks[each.chunk])
            if data is None:
                elsewhere.append(each)
            else:
                blocks += self._blocks(each, data)
        held = sum(data.nbytes for some in self._fetched.values() for data in some.values())
        if elsewhere and max(held, candidate.segment.bytes) > 2 * APART_BYTES:  # what is fetched must stay in memory
            return False
        changed = self._changed(blocks, stop=True)
        for each in elsewhere if not changed else ():
            source = self._arrays[each.array].chunks[each.chunk]
            data = self._fetched[each.array][each.chunk] = fetched_bytes(source)
            changed = self._changed(self._blocks(each, data), stop=True)
            if changed:
                break
        self._steady -= changed
        return not changed

    def look_for_steady_arrays(self) -> None:
        """Compare all arrays that are here, unless that was done when they were written before."""
        before = self._known.before
        if before is None or before.steady is not None:
            return
        blocks, names = list[_Block](), set[str]()
        for index, array in enumerate(self._arrays):
            found = self._found(index, array)
            flat = [flat_bytes(source) for source in array.chunks]
            size = sum(len(each) for each in flat if each is not None)
            if index not in self._taken and len(found) == len(flat) and size >= MIN_COMPARED_BYTES:
                here = [(each, data) for each in found if (data := flat[each.chunk]) is not None]
                if len(here) == len(flat):
                    names.add(array.name)
                    blocks += [block for each, data in here for block in self._blocks(each, data)]
        self._steady |= names - self._changed(blocks, stop=False)

    def _blocks(self, found: Found, data: np.ndarray) -> list[_Block]:
        name, digests = self._arrays[found.array].name, found.record.digests
        places = range(0, len(data), BLOCK_BYTES)
        each = (digests[number * self._width : (number + 1) * self._width] for number in range(len(places)))
        return [_Block(name, data[at : at + BLOCK_BYTES], one) for at, one in zip(places, each, strict=True)]

    def _changed(self, blocks: Sequence[_Block], *, stop: bool) -> frozenset[str]:
        """The names of the arrays with other bytes than before; `stop`: one of them is enough."""
        changed = set[str]()

        def compare(block: _Block) -> None:
            is_known = bool(changed) if stop else block.name in changed
            if not is_known and self._digest(memoryview(block.data)) != block.digest:
                changed.add(block.name)

        if blocks:
            self._workers.run_all(compare, blocks)
            report_progress()
        return frozenset(changed)

    def records(self, candidate: Candidate) -> list[tuple[ArrayRecord, ChunkRecord]]:
        """The records of the chunks of a segment before."""
        before = self._known.before
        assert before is not None
        return [(before.arrays[self._arrays[each.array].name], each.record) for each in candidate.chunks]

    def take(self, candidate: Candidate) -> None:
        """Leave the chunks of this segment out of what is written."""
        for index, number, _ in candidate.chunks:
            self._taken[index].add(number)
            self._fetched[index].pop(number, None)
            data: Any = self._arrays[index].chunks[number].data
            if hasattr(data, "leave"):  # it is not in host memory, or was fetched from elsewhere
                data.leave()

    def divided(self) -> tuple[Sequence[ArraySource], Sequence[ArraySource]]:
        """What is left to write: arrays that get segments of their own, and the others; each in its place, or empty."""
        steady, frozen = self._steady, self._known.frozen
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


def steady_arrays(before: WrittenBefore | None, arrays: Sequence[ArrayRecord]) -> frozenset[str] | None:
    """The names of arrays that have the same bytes as before; None: there is nothing before."""
    if before is None:
        return None
    pairs = ((before.arrays.get(array.name), array) for array in arrays if array.chunks)
    return frozenset(now.name for was, now in pairs if was is not None and _is_equal(was, now))


def _is_equal(was: ArrayRecord, now: ArrayRecord) -> bool:
    if (was.shape, was.dtype, len(was.chunks)) != (now.shape, now.dtype, len(now.chunks)):
        return False
    digests = {chunk.box: chunk.digests for chunk in was.chunks}
    return all(digests.get(chunk.box) == chunk.digests for chunk in now.chunks)
