"""The rate of the disk is measured by real writes, which leave no file."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.report.series import BLOCK_BYTES, measure_disk
from jaxckpt_train.store.backends.local import LocalBackend


class CountingBackend(LocalBackend):
    """Records the size of each created file, and whether it was synced."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, bool]] = []

    def create(self, path: str, *, direct: object) -> object:
        sink, sizes = super().create(path, direct=direct), self.sizes  # type: ignore[arg-type]
        finish = sink.finish

        def counted(size: int, *, sync: bool) -> None:
            finish(size, sync=sync)
            sizes.append((Path(path).stat().st_size, sync))

        sink.finish = counted  # type: ignore[method-assign]
        return sink


class FullBackend(LocalBackend):
    """Accepts the first block of a file, and fails on the second one."""

    def create(self, path: str, *, direct: object) -> object:
        sink = super().create(path, direct=direct)  # type: ignore[arg-type]
        write_at = sink.write_at

        def full(offset: int, data: np.ndarray) -> None:
            if offset:
                raise StorageError(errno.ENOSPC, "no space left", path)
            write_at(offset, data)

        sink.write_at = full  # type: ignore[method-assign]
        return sink


def test_each_try_syncs_all_and_removes_it(tmp_path: Path) -> None:
    backend = CountingBackend()
    rate = measure_disk(backend, str(tmp_path), 3 * BLOCK_BYTES, tries=2)
    assert backend.sizes == [(3 * BLOCK_BYTES, True)] * 2
    assert (rate.bytes, rate.tries) == (3 * BLOCK_BYTES, 2)
    assert 1e6 < rate.bytes_per_s < 1e12
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_without_leftovers(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no space"):
        measure_disk(FullBackend(), str(tmp_path), 2 * BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == []
