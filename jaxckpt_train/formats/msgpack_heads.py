"""The first bytes of files that may be msgpack, as Flax and first versions of Orbax write it."""

from __future__ import annotations

import numpy as np

from jaxckpt_train.store.backend import Backend

_HEAD_BYTES = 6


def first_bytes(backend: Backend, directory: str, name: str) -> tuple[bytes, int]:
    """The first bytes of a file, and how many there are in all.

    Raises:
        StorageError: it cannot be read.
    """
    source = backend.open(directory, name, direct=False)
    try:
        data = np.empty(min(source.size, _HEAD_BYTES), np.uint8)
        if len(data):
            source.read_into(0, data, len(data))
        return data.tobytes(), source.size
    finally:
        source.close()


def begins_as_text(head: bytes) -> bool:
    """Whether these are the first bytes of a text in msgpack."""
    return bool(head) and (0xA0 <= head[0] < 0xC0 or 0xD9 <= head[0] <= 0xDB)
