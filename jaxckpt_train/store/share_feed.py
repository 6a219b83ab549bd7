"""A feed: the share of this process read from its files, window after window, each digest block once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.read_shares import Piece, Stream
from jaxckpt_train.store.reader import Progress, iter_boxes
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.warm_memory import WarmMemory


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
        self._told_progress, self._is_stopped = progress, False
        self._settings, self._warm = settings, WarmMemory()
        self._pieces = stream.pieces
        self._next = (0, 0)  # number of a piece, and bytes of it that are read
        self._held: list[tuple[int, np.ndarray]] = []  # what was read and not all given: its place in the stream

    def fill(self, target: np.ndarray, start: int, stop: int) -> None:
        """Bytes [start, stop) of the stream into `target`; each window begins where the last one ended.

        Args:
            target: flat uint8.
            start: of the window.
            stop: of the window.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: as `iter_boxes`.
        """
        held, self._held = self._held, []
        for at, data in held:
            self._give(at, data, target, start, stop)
        del held
        chosen = self._unread_before(stop)  # what lies between them is another process's to read, or no array
        wanted = [self._wanted(each, target, start, stop) for each in chosen]
        reading = iter_boxes(
            self._files, self._committed, wanted, self._settings, self._moved, gap_bytes=ALIGNMENT, warm=self._warm
        )
        with contextlib.closing(reading) as boxes:
            for number, _, data in boxes:
                if wanted[number].target is None:
                    self._give(chosen[number].at, data, target, start, stop)
                del data

    def _wanted(self, piece: Piece, target: np.ndarray, start: int, stop: int) -> Wanted:
        """Of a piece that lies in the window whole all goes there at once."""
        end = piece.at + piece.stop - piece.start
        place = target[piece.at - start : end - start] if start <= piece.at and end <= stop else None
        box = ((piece.start, piece.stop),)
        return Wanted(_flat(self._arrays[piece.wanted], piece.chunk), [box], target=place)

    def stop(self) -> None:
        """Have what is being read end soon, with an error; from any thread."""
        self._is_stopped = True

    def _moved(self, done: int) -> None:
        if self._is_stopped:
            raise CheckpointError("nobody waits any more for what is read")
        if self._told_progress is not None:
            self._told_progress(done)

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
            within = (stop - piece.at) // block * block if piece.at + end > stop else end
            for low, high in ((read, within), (within, end)):
                if low < high:
                    chosen.append(piece._replace(start=piece.start + low, stop=piece.start + high, at=piece.at + low))
            number, read = (number + 1, 0) if end == length else (number, end)
        self._next = number, read
        return chosen


def _flat(array: ArrayRecord, chunk: ChunkRecord) -> ArrayRecord:
    """One chunk as an array of bytes, whatever is in it."""
    alone = ChunkRecord(((0, chunk.length),), chunk.segment, chunk.offset, chunk.length, chunk.digests)
    return ArrayRecord(array.name, (chunk.length,), "uint8", (alone,))
