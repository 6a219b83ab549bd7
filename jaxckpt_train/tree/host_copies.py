"""Copies of state that is on the host already, into memory that is kept and used again by the next save."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.store.staging import fresh_area
from jaxckpt_train.store.workers import shared_workers

COPYING_THREADS = 2
PIECE_BYTES = 16 << 20
ALIGNMENT = 64
LEAST_PAGED_BYTES = 1 << 20

_KEPT_AREAS = 8

_kept: list[mmap.mmap] = []  # memory that no copy uses at the moment, touched already: an area per tree


def copy_all(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Row-major copies of all arrays, made by a few threads at the speed of memory from the second time on.

    The memory is as large as the state, and kept for the next save when the last of the copies is dropped. Large copies
    begin on a page, so that the disk can have them from where they are.
    """
    if not arrays:
        return []
    starts, end = [], 0
    for array in arrays:
        alignment = mmap.PAGESIZE if array.nbytes >= LEAST_PAGED_BYTES else ALIGNMENT
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + array.nbytes
    area = _take(end)
    memory = np.frombuffer(area, np.uint8)
    weakref.finalize(memory, _give_back, area).atexit = False
    copies = [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
    shared_workers(COPYING_THREADS, "jaxckpt-copy").run_all(_copy, _portions(arrays, copies))
    return copies


def _portions(arrays: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """What one thread copies at a time: many small arrays, or a part of a large one."""
    portions: list[list[tuple[np.ndarray, np.ndarray]]] = []
    filled = 0
    for array, copy in zip(arrays, copies, strict=True):
        pieces = [(array, copy)]
        if array.nbytes > PIECE_BYTES and array.flags.c_contiguous:
            source, target = array.reshape(-1), copy.reshape(-1)
            step = PIECE_BYTES // array.itemsize
            pieces = [(source[at : at + step], target[at : at + step]) for at in range(0, array.size, step)]
        for piece in pieces:
            if not portions or filled + piece[0].nbytes > PIECE_BYTES:
                portions.append([])
                filled = 0
            portions[-1].append(piece)
            filled += piece[0].nbytes
    return portions


def _copy(portion: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for source, target in portion:
        np.copyto(target, source)


def _take(size: int) -> mmap.mmap:
    """Memory that was used for as much before; where there is none, the trees have changed, and all is made anew."""
    for area in sorted(_kept, key=len):
        if size <= len(area) <= 2 * size + mmap.PAGESIZE:
            with contextlib.suppress(ValueError):  # another thread took it at this moment
                _kept.remove(area)
                return area
    _kept.clear()
    return fresh_area(max(size, mmap.PAGESIZE))


def _give_back(area: mmap.mmap) -> None:
    _kept.append(area)
    del _kept[:-_KEPT_AREAS]


os.register_at_fork(after_in_child=_kept.clear)
