"""A feed: the share of this process read from its files, window after window, each digest block once."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.answers import answer_of, have_closed
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_budget import ReadBudget
from jaxckpt_train.store.read_plan import Wanted, plan_reads
from jaxckpt_train.store.read_shares import Piece, Stream
from jaxckpt_train.store.reader import Progress, band_bytes, run_reads
from jaxckpt_train.store.reading import Reading
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.sources import Sources
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.warm_memory import WarmMemory


class Window:
    """Bytes [start, stop) of a stream that are being read.

    Args:
        target: where they go: flat uint8.
        start: of them.
        stop: of them.
        left: the segment of each piece of the stream of which nothing is to be read after this window.

    Attributes:
        crossing: of what is read with it, what goes on after its end, with its place in the stream.
    """

    def __init__(self, target: np.ndarray, start: int, stop: int, left: Sequence[int]) -> None:
        self.target, self.start, self.stop, self.left = target, start, stop, left
        self.crossing = list[tuple[int, np.ndarray]]()

    def place_for(self, piece: Piece) -> np.ndarray:
        """Where a piece is put when it is read: here, or, if not all of it lies here, in memory of its own."""
        at, size = piece.at - self.start, piece.stop - piece.start
        if at + size <= self.stop - self.start:
            return self.target[at : at + size]
        self.crossing.append((piece.at, np.empty(size, np.uint8)))
        return self.crossing[-1][1]

    def put(self, at: int, data: np.ndarray) -> bool:
        """Put what lies at a place of the stream here, as far as it lies in the window; whether it goes on after."""
        low, high = max(at, self.start), min(at + len(data), self.stop)
        if low < high:
            self.target[low - self.start : high - self.start] = data[low - at : high - at]
        return at + len(data) > self.stop


class ShareFeed:
    """Reads a stream in order. What a window leaves of its last block is kept for the next one.

    Args:
        files: where.
        committed: the opened checkpoint.
        arrays: those whose numbers the pieces say.
        stream: what to read.
        settings: threads, budget, verification.
        progress: as of `iter_boxes`.

    Attributes:
        directory: of the checkpoint.
        reads: another number after each.
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
        self.directory, self.reads = committed.directory, 0
        self._committed, self._arrays, self._settings, self._told_progress = committed, arrays, settings, progress
        self._is_open = self._is_stopped = False
        self._budget, self._warm = ReadBudget(settings.read_budget_bytes), WarmMemory()
        self._pieces = stream.pieces
        self._sources = Sources(files, committed, settings, [piece.chunk.segment for piece in stream.pieces])
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
        window, reads = self.begin(target, start, stop)
        each = run_reads(
            self.directory, self._settings, operator.call, reads, give_up=self._budget.lift, moved=self._have_moved
        )
        with contextlib.closing(each) as results:
            for _ in results:
                pass
        self.finish(window)

    def begin(self, target: np.ndarray, start: int, stop: int) -> tuple[Window, list[Callable[[], object]]]:
        """As `fill`, but nothing is read yet: what is to be called, on any threads, before the window is finished.

        Windows are finished in their order, and several may be begun by then.
        """
        if not self._is_open:
            self._is_open = True
            answer_of(f"{self.directory}: segments", self._sources.open, self._moved)
        pieces, left = self._unread_before(stop)
        window = Window(target, start, stop, left)
        wanted = [self._wanted(piece, window.place_for(piece)) for piece in pieces]
        runs = plan_reads(self._committed.manifest, wanted, band_bytes(self._settings), ALIGNMENT)
        reading = Reading(self._sources, self._committed, wanted, self._settings, self._moved, self._budget, self._warm)
        return window, [functools.partial(reading.read_run, run) for run in runs]

    def finish(self, window: Window) -> None:
        """Complete a window of which all was read, after those before it."""
        crossing, self._held = [*self._held, *window.crossing], []
        window.crossing.clear()
        self._held.extend(each for each in crossing if window.put(*each))
        for segment in window.left:
            self._sources.done(segment)

    def close(self) -> None:
        """Have what is being read end soon, with an error, and the files closed."""
        self._is_stopped = True
        have_closed(self._sources.end())

    def _have_moved(self) -> int:
        """For who waits. A progress may raise here."""
        self._moved(0)
        return self.reads

    def _moved(self, done: int) -> None:
        if self._is_stopped:
            raise CheckpointError(f"{self.directory}: nobody waits any more for what is read")
        if done:
            self.reads += 1
        if self._told_progress is not None:
            self._told_progress(done)

    def _wanted(self, piece: Piece, place: np.ndarray) -> Wanted:
        return Wanted(_flat(self._arrays[piece.wanted], piece.chunk), [((piece.start, piece.stop),)], target=place)

    def _unread_before(self, stop: int) -> tuple[list[Piece], list[int]]:
        """The whole blocks that begin before `stop` in the stream and are not read yet; the segments of what ends so.

        What lies between them in the files is another process's to read, or no array.
        """
        block, chosen, left = self._committed.manifest.block_bytes, list[Piece](), list[int]()
        number, read = self._next
        while number < len(self._pieces) and self._pieces[number].at + read < stop:
            piece = self._pieces[number]
            length = piece.stop - piece.start
            end = min(length, -(-(stop - piece.at) // block) * block)
            within = (stop - piece.at) // block * block if piece.at + end > stop else end
            for low, high in ((read, within), (within, end)):
                if low < high:
                    chosen.append(piece._replace(start=piece.start + low, stop=piece.start + high, at=piece.at + low))
            if end == length:
                left.append(piece.chunk.segment)
            number, read = (number + 1, 0) if end == length else (number, end)
        self._next = number, read
        return chosen, left


def _flat(array: ArrayRecord, chunk: ChunkRecord) -> ArrayRecord:
    """One chunk as an array of bytes, whatever is in it."""
    alone = ChunkRecord(((0, chunk.length),), chunk.segment, chunk.offset, chunk.length, chunk.digests)
    return ArrayRecord(array.name, (chunk.length,), "uint8", (alone,))
