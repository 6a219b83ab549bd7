"""Warm memory: buffers that what is only copied from is read into, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from jaxckpt_train.store.staging import aligned_buffer


class WarmMemory:
    """As many buffers as are used at a time. The one that was used last is lent first: it may still be in a cache.

    Fresh memory in its place costs more than to copy what is read into it: its first touch, each time.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    @contextlib.contextmanager
    def lent(self, size: int) -> Iterator[np.ndarray]:
        """`size` bytes at a page boundary, which hold whatever their last user has left. No view of them may stay."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned_buffer(size)
        if buffer.nbytes < size:
            buffer = aligned_buffer(size)
        yield buffer[:size]
        self._free.append(buffer)
