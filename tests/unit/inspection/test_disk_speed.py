"""The trial of a disk: it measures actual reads and writes, and leaves no file."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.inspection import disk_speed as disk_trial
from jaxckpt_train.inspection.disk_speed import BLOCK_BYTES, try_disk
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend, LocalSource, _LocalSink

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 12288])
def test_all_bytes_are_written_and_read(tmp_path: Path, nbytes: int) -> None:
    seen: list[int] = []
    found = try_disk(LocalBackend(), str(tmp_path), nbytes, seen.append)
    assert found.bytes == max(nbytes // 4096, 1) * 4096
    assert sum(seen) == 2 * found.bytes
    assert 0 <= found.sync_s <= found.bytes / found.write_bytes_per_s
    assert min(found.read_bytes_per_s, found.small_file_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_trial_file_is_never_visible(tmp_path: Path) -> None:
    names: list[list[str]] = []
    try_disk(LocalBackend(), str(tmp_path), MIB, lambda done: names.append(os.listdir(tmp_path)))
    assert names == [[], []]


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupt_leaves_nothing(tmp_path: Path, after: int) -> None:
    calls = []

    def interrupt(done: int) -> None:
        calls.append(done)
        if len(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        try_disk(LocalBackend(), str(tmp_path), 2 * BLOCK_BYTES, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_direct_io_is_tried_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, read_at = os.pwrite, local._read_at

    def refuse_direct(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")

    def refuse_writes(descriptor: int, data: memoryview, offset: int) -> int:
        refuse_direct(descriptor)
        return pwrite(descriptor, data, offset)

    def refuse_reads(descriptor: int, data: memoryview, offset: int) -> int:
        refuse_direct(descriptor)
        return read_at(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_writes)
    found = try_disk(LocalBackend(), str(tmp_path), MIB, print)
    assert (found.direct_write, found.bytes) == (False, MIB)
    monkeypatch.setattr(local, "_read_at", refuse_reads)
    assert try_disk(LocalBackend(), str(tmp_path), MIB, print).direct_read is False
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, size: int, *, sync: bool) -> None:
        raise StorageError(errno.ENOSPC, "cannot finish writing: No space left on device", "it")

    monkeypatch.setattr(_LocalSink, "finish", full)
    with pytest.raises(StorageError, match="No space left"):
        try_disk(LocalBackend(), str(tmp_path), MIB, print)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_returns_other_bytes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = LocalSource.read_into

    def flip(self: Any, offset: int, data: np.ndarray, needed: int) -> None:
        read_into(self, offset, data, needed)
        data[100] ^= 1

    monkeypatch.setattr(LocalSource, "read_into", flip)
    with pytest.raises(CorruptCheckpointError, match="returned other bytes"):
        try_disk(LocalBackend(), str(tmp_path), MIB, print)


def test_trial_bytes_are_incompressible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a file system that compresses would seem faster than it is."""
    import zlib

    written: list[bytes] = []
    monkeypatch.setattr(disk_trial, "_write", lambda sink, block, *_: (written.append(block.tobytes()), (1.0, 0.5))[1])
    monkeypatch.setattr(disk_trial, "_read", lambda *_: 1.0)
    try_disk(LocalBackend(), str(tmp_path), MIB, print)
    assert len(zlib.compress(written[0])) > 0.95 * MIB
