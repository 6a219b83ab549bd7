"""Read shares: which process of a job reads which blocks of each array, so that no block is read twice."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT


class Piece(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`, whole digest blocks; at `at` in the stream of a process.

    `at` is a multiple of 64 bytes, so that no cut of a stream at such a multiple goes through an element.
    """

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Cut(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`; at `at` in a window of a stream."""

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Stream:
    """All that one process reads, one piece after the other.

    Attributes:
        pieces: in the order in which they are read.
        bytes: of them.
        end: where the last one ends, with the room between them.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.bytes = self.end = 0
        self._starts: list[int] = []

    def add(self, wanted: int, chunk: ChunkRecord, start: int, stop: int) -> None:
        """One more block; it lengthens the last piece if it follows that."""
        self.bytes += stop - start
        if self.pieces:
            last = self.pieces[-1]
            if last.chunk is chunk and last.stop == start:
                self.pieces[-1] = last._replace(stop=stop)
                self.end = last.at + stop - last.start
                return
        at = -(-self.end // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        self.pieces.append(Piece(wanted, chunk, start, stop, at))
        self._starts.append(at)
        self.end = at + stop - start

    def within(self, start: int, stop: int) -> Iterator[Cut]:
        """What of the pieces lies in the window from `start` to `stop`."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for piece in itertools.islice(self.pieces, first, None):
            if piece.at >= stop:
                return
            low, high = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
            if low < high:
                skipped = piece.start - piece.at
                yield Cut(piece.wanted, piece.chunk, skipped + low, skipped + high, low - start)


def read_shares(
    arrays: Sequence[ArrayRecord], processes: int, block_bytes: int, order_of: Callable[[int], Sequence[int]]
) -> list[Stream]:
    """What each process reads of these arrays: the same number of bytes but for a block or two, in long runs.

    Arrays that follow each other in the files are handed out together, as many as have a block for each process; so
    all of them are complete soon after their first byte is there, and small ones are not read by turns.

    Args:
        arrays: which.
        processes: how many.
        block_bytes: of the digests: what is read by one.
        order_of: of the largest array of a group, by its number: in which order the processes take from it.
    """
    streams = [Stream() for _ in range(processes)]
    group: list[int] = []
    size = 0
    for number in sorted(range(len(arrays)), key=lambda number: _place(arrays[number])):
        group.append(number)
        size += stored_bytes(arrays[number])
        if size >= processes * block_bytes:
            _hand_out(arrays, group, size, streams, block_bytes, order_of)
            group, size = [], 0
    _hand_out(arrays, group, size, streams, block_bytes, order_of)
    return streams


def stored_bytes(array: ArrayRecord) -> int:
    """Bytes of all of its chunks."""
    return sum(chunk.length for chunk in array.chunks)


def _place(array: ArrayRecord) -> tuple[int, int]:
    return min(((chunk.segment, chunk.offset) for chunk in array.chunks), default=(0, 0))


def _hand_out(
    arrays: Sequence[ArrayRecord],
    group: Sequence[int],
    size: int,
    streams: Sequence[Stream],
    block_bytes: int,
    order_of: Callable[[int], Sequence[int]],
) -> None:
    """Give each process one run of the group's blocks, longer for those that have less so far."""
    if not size:
        return
    order = order_of(max(group, key=lambda number: stored_bytes(arrays[number])))
    level = (sum(stream.bytes for stream in streams) + size) / len(streams)
    lacks = [max(0.0, level - streams[process].bytes) for process in order]
    edges = [size * lack / sum(lacks) for lack in itertools.accumulate(lacks)]
    done = 0
    for number in group:
        for chunk in arrays[number].chunks:
            for start in range(0, chunk.length, block_bytes):
                stop = min(start + block_bytes, chunk.length)
                middle = done + (stop - start) / 2
                turn = min(bisect.bisect_right(edges, middle), len(order) - 1)
                streams[order[turn]].add(number, chunk, start, stop)
                done += stop - start
