"""Two ways of shares to those who need them: to all processes alike, or to each only what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_repeats import Needs
from jaxckpt_train.store.read_shares import Stream
from jaxckpt_train.store.share_parts import Assembly, pack, row_bytes
from jaxckpt_train.store.staging import aligned_buffer
from jaxckpt_train.tree.job_transfer import LEAST_ROW_BYTES, JobTransfer, Moving

STEPS = 8
"""Rows are of at most so many lengths: each is another program to compile."""


class Shared(NamedTuple):
    """One array that the processes read once.

    Attributes:
        number: of it in the load.
        array: its record.
        needs: what each process needs of it.
        numbers: of the boxes that this process needs, in the load.
    """

    number: int
    array: ArrayRecord
    needs: Needs
    numbers: Sequence[int]


def assembly_of(shared: Sequence[Shared], process: int) -> Assembly:
    """Where a process puts together what it needs; boxes are numbered as in `needs`, by which all of them know them."""
    return Assembly([each.array for each in shared], [each.needs[process] for each in shared])


class Gathering:
    """Everybody gets everything: for what most processes need nearly all of.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: how much of each stream goes at a time.
        transfer: what moves it.
        process: number of this one.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        streams: Sequence[Stream],
        window_bytes: int,
        transfer: JobTransfer,
        process: int,
    ) -> None:
        self.assembly = assembly_of(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, transfer
        self._end = max(stream.end for stream in streams)
        self.windows = -(-self._end // window_bytes)

    def window(self, number: int) -> tuple[int, int]:
        """From where to where it goes in each stream."""
        start = number * self._window_bytes
        return start, start + in_steps(min(self._window_bytes, self._end - start), self._window_bytes)

    def send(self, number: int, window: np.ndarray) -> Moving | None:
        """Give what this process has read of a window."""
        return self._transfer.gather(window)

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take from what has come what this process needs."""
        start, stop = self.window(number)
        for stream, row in zip(self._streams, rows, strict=True):
            for cut in stream.within(start, stop):
                self.assembly.add_cut(cut, row)


class Exchange:
    """Each process gets what it needs: for arrays that are cut up among them.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: how much of each stream goes at a time.
        transfer: what moves it.
        process: number of this one.
        rows: of each window the length of the longest row that any process sends to another.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        streams: Sequence[Stream],
        window_bytes: int,
        transfer: JobTransfer,
        process: int,
        rows: Sequence[int],
    ) -> None:
        self.assembly = assembly_of(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, transfer
        self._process = process
        self._dtypes = [DTYPES[each.array.dtype] for each in shared]
        self._needs = [each.needs for each in shared]
        most = -(-max(rows) // LEAST_ROW_BYTES) * LEAST_ROW_BYTES
        self._rows = [in_steps(length, most) for length in rows]
        self.windows = len(rows)

    def window(self, number: int) -> tuple[int, int]:
        """From where to where it goes in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def send(self, number: int, window: np.ndarray) -> Moving | None:
        """Give the others what they need of what this process has read, and take what it needs itself."""
        cuts = list(self._streams[self._process].within(*self.window(number)))
        moving = None
        if self._rows[number]:
            rows = aligned_buffer(len(self._streams) * self._rows[number]).reshape(len(self._streams), -1)
            for process in range(len(rows)):
                at = 0
                for cut in cuts if process != self._process else ():
                    boxes = self._needs[cut.wanted][process]
                    at = pack(cut, window, self._dtypes[cut.wanted], boxes, rows[process], at)
            moving = self._transfer.exchange(rows)
        for cut in cuts:
            self.assembly.add_cut(cut, window)
        return moving

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take what has come."""
        for process, (stream, row) in enumerate(zip(self._streams, rows, strict=True)):
            at = 0
            for cut in stream.within(*self.window(number)) if process != self._process else ():
                at = self.assembly.add_row(cut, row, at)


def longest_rows(shared: Sequence[Shared], streams: Sequence[Stream], process: int, window_bytes: int) -> list[int]:
    """Of each window the length of the longest row that this process sends to another in an `Exchange`."""
    dtypes = [DTYPES[each.array.dtype] for each in shared]
    found = []
    for start in range(0, max(stream.end for stream in streams), window_bytes):
        lengths = [0] * len(streams)
        for cut in streams[process].within(start, start + window_bytes):
            for other, boxes in enumerate(shared[cut.wanted].needs):
                if other != process and boxes:
                    lengths[other] += row_bytes(cut, dtypes[cut.wanted].itemsize, boxes)
        found.append(max(lengths))
    return found


def in_steps(length: int, most: int) -> int:
    """Not less than `length`, and one of few numbers up to `most`, which is whole rows of the least length."""
    step = -(-most // (STEPS * LEAST_ROW_BYTES)) * LEAST_ROW_BYTES
    return min(-(-length // step) * step, most) if length else 0
