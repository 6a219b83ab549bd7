"""Pieces of arrays that can only be read whole, kept in memory while parts of them are asked for."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError

HELD_BYTES = 256 << 20


class Newest:
    """Keeps the pieces that were asked for last: one, and as many more as have at most `HELD_BYTES` together."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, content: np.ndarray) -> None:
        """Keep one, in place of the oldest ones."""
        with self._lock:
            if id(content) not in self._kept:
                self._kept[id(content)] = content
                self._bytes += content.nbytes
            self._kept.move_to_end(id(content))
            while self._bytes > HELD_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


class HeldPiece:
    """A piece: read when the first part of it is asked for, and once for all who ask before it is forgotten.

    Args:
        name: for messages.
        size: in bytes.
        read: gives all of it, flat uint8.
        newest: keeps it a little longer than it is in use.
    """

    def __init__(self, name: str, size: int, read: Callable[[], np.ndarray], newest: Newest) -> None:
        self._name, self._size, self._read, self._newest = name, size, read, newest
        self._content: weakref.ref[np.ndarray] | None = None
        self._lock = threading.Lock()

    def open(self, direct: Any) -> PieceBytes:
        """A source of its bytes."""
        return PieceBytes(self._name, self._size, self.whole)

    def whole(self) -> np.ndarray:
        """All of it."""
        with self._lock:
            content = None if self._content is None else self._content()
            if content is None:
                content = self._read()
                self._content = weakref.ref(content)
        self._newest.keep(content)
        return content


class HeldPieces:
    """Pieces of one array, by their places in it.

    Args:
        newest: keeps them a little longer than they are in use.
    """

    def __init__(self, newest: Newest) -> None:
        self._newest, self._pieces = newest, dict[int, HeldPiece]()

    def get(self, place: int, name: str, size: int, read: Callable[[], np.ndarray]) -> np.ndarray:
        """All of a piece, flat uint8: read, unless it is held; see `HeldPiece`."""
        return self._pieces.setdefault(place, HeldPiece(name, size, read, self._newest)).whole()


class PieceBytes:
    """A source of the bytes of a piece, which it holds from the first read to the one of the last byte."""

    alignment = 1

    def __init__(self, name: str, size: int, whole: Callable[[], np.ndarray]) -> None:
        self._name, self.size, self._whole = name, size, whole
        self._content: np.ndarray | None = None

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        content = self._content
        if content is None:
            content = self._whole()
        part = content[offset : offset + len(data)]
        data[: len(part)] = part
        self._content = None if offset + len(data) >= self.size else content

    def close(self) -> None:
        """Hold it no more."""
        self._content = None
