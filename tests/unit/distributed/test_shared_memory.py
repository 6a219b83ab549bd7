"""Shared memory: found only by its address, of fixed size, and read-only for other processes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxckpt_train.distributed.shared_memory import SharedMemory, open_memory
from tests.support.addresses import changed

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")


def test_reader_sees_later_writes_to_hidden_memory() -> None:
    memory = SharedMemory(8192)
    here = open_memory(memory.address)
    memory.hide()
    memory.data[5000] = 9
    assert here[5000] == 9
    with pytest.raises(ValueError, match="read-only"):
        here[0] = 1


def test_other_memory_is_refused(tmp_path: Path) -> None:
    memory, other = SharedMemory(8192), SharedMemory(8192)
    reading, writing = os.pipe()
    try:
        for place, value in (
            (1, msgspec.msgpack.decode(other.address)[1]),  # other memory of this kind
            (1, reading),  # opening a pipe would block forever
            (1, 10_000),
            (2, 4096),
            (0, 2**31 - 1),
            (3, b"x" * 16),
        ):
            with pytest.raises(OSError):  # noqa: PT011  # of several kinds
                open_memory(changed(memory.address, place, value))
        assert np.array_equal(open_memory(memory.address), memory.data)
    finally:
        for descriptor in (reading, writing):
            os.close(descriptor)
        memory.hide()
        other.hide()


def test_shared_memory_cannot_be_truncated() -> None:
    memory = SharedMemory(8192)
    path = f"/proc/self/fd/{msgspec.msgpack.decode(memory.address)[1]}"
    with pytest.raises(PermissionError):
        os.truncate(path, 4096)
    memory.hide()
