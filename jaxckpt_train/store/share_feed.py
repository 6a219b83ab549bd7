"""A feed: the share of this process read from its files, window after window, each digest block once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_plan import Wanted, parts_bytes
from jaxckpt_train.store.read_shares import Piece, Stream
from jaxckpt_train.store.reader import READS_PER_THREAD, Progress, iter_boxes
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.transaction import Committed


class ShareFeed:
    """Reads a stream in order. What a window leaves of its last block is kept for the next one.

    Args:
        files: where.
        committed: the opened checkpoint.
        arrays: those whose numbers the pieces say.
        stream: what to read.
        settings: threads, budget, verification.
        progress: as of `iter_boxes`.
    """

    def __init__(
        self,
        files: Opener,
        committed: Committed,
        arrays: Sequence[ArrayRecord],
        stream: Stream,
        settings: StoreSettings,
        progress: Progress | None,
    ) -> None:
        self._files, self._committed, self._arrays = files, committed, arrays
        self._progress = progress
        self._read_bytes = parts_bytes(committed.manifest.block_bytes)
        most = self._read_bytes * READS_PER_THREAD * settings.known_io_threads * 2  # more is not read by one call
        self._settings = dataclasses.replace(settings, read_budget_bytes=min(settings.read_budget_bytes, most))
        self._pieces = stream.pieces
        self._next = (0, 0)  # number of a piece, and bytes of it that are read
        self._held: list[tuple[int, np.ndarray]] = []  # what was read and not all given: its place in the stream

    def fill(self, target: np.ndarray, start: int, stop: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Bytes [start, stop) of the stream into `target`; each window begins where the last one ended.

        Args:
            target: flat uint8; where it lies at a page boundary, most of it is read to its place.
            start: of the window.
            stop: of the window.
            meanwhile: called once while other threads read.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: as `iter_boxes`.
        """
        held, self._held = self._held, []
        for at, data in held:
            self._give(at, data, target, start, stop)
        del held
        chosen = self._unread_before(stop)  # what lies between them is another process's to read, or no array
        wanted = [Wanted(_flat(self._arrays[each.wanted], each.chunk), [((each.start, each.stop),)]) for each in chosen]
        places = _Places(chosen, target, start, stop)
        reading = iter_boxes(
            self._files, self._committed, wanted, self._settings, self._progress, gap_bytes=ALIGNMENT, into=places.of
        )
        with contextlib.closing(reading) as boxes:
            for number, _, data in boxes:
                if not places.holds(number, data):
                    self._give(chosen[number].at, data, target, start, stop)
                del data
                meanwhile()
                meanwhile = _nothing
        meanwhile()

    def _give(self, at: int, data: np.ndarray, target: np.ndarray, start: int, stop: int) -> None:
        low, high = max(at, start), min(at + len(data), stop)
        if low < high:
            target[low - start : high - start] = data[low - at : high - at]
        if at + len(data) > stop:
            self._held.append((at, data))

    def _unread_before(self, stop: int) -> list[Piece]:
        """The whole blocks that begin before `stop` in the stream and are not read yet."""
        block, chosen = self._committed.manifest.block_bytes, list[Piece]()
        number, read = self._next
        while number < len(self._pieces) and self._pieces[number].at + read < stop:
            piece = self._pieces[number]
            length = piece.stop - piece.start
            end = min(length, -(-(stop - piece.at) // block) * block)
            for at in range(read, end, self._read_bytes):
                to = min(at + self._read_bytes, end)
                chosen.append(piece._replace(start=piece.start + at, stop=piece.start + to, at=piece.at + at))
            number, read = (number + 1, 0) if end == length else (number, end)
        self._next = number, read
        return chosen


class _Places:
    """Where in a window pieces are read to at once: those that lie in it from a page boundary on, with room to the end
    of a page.
    """

    def __init__(self, pieces: Sequence[Piece], target: np.ndarray, start: int, stop: int) -> None:
        self._of: dict[int, np.ndarray] = {}
        for number, piece in enumerate(pieces):
            end = min(stop, pieces[number + 1].at) if number + 1 < len(pieces) else stop
            fits = start <= piece.at and piece.at + piece.stop - piece.start <= end
            if fits and (piece.at - start) % ALIGNMENT == 0:
                self._of[number] = target[piece.at - start : end - start]

    def of(self, number: int) -> np.ndarray | None:
        """The memory for a piece; None: it is to be copied."""
        return self._of.get(number)

    def holds(self, number: int, data: np.ndarray) -> bool:
        """Whether this is it, and not a copy that lies elsewhere."""
        place = self._of.get(number)
        return place is not None and place.ctypes.data == data.ctypes.data


def _nothing() -> None:
    pass


def _flat(array: ArrayRecord, chunk: ChunkRecord) -> ArrayRecord:
    """One chunk as an array of bytes, whatever is in it."""
    alone = ChunkRecord(((0, chunk.length),), chunk.segment, chunk.offset, chunk.length, chunk.digests)
    return ArrayRecord(array.name, (chunk.length,), "uint8", (alone,))
