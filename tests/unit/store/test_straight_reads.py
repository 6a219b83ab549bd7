"""Boxes read directly into memory of the caller, without a copy where alignment permits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import box_elements
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.reader import read_box
from tests.support.runs import flip_a_payload_byte

MIB = 1 << 20
VALUES = np.random.default_rng(0).integers(0, 256, (12 * 1024, 1024), np.uint8)  # rows of 1 KiB
FILL = 0xA5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a"
    jct.save(path, {"x": VALUES})
    return path


class Watched:
    """A source that records the memory of each read."""

    def __init__(self, source: Source, places: list[np.ndarray]) -> None:
        self._source, self._places = source, places
        self.size, self.alignment, self.close = source.size, source.alignment, source.close

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        if offset:  # not the header of a segment
            self._places.append(data)
        self._source.read_into(offset, data, needed)


class WatchedBackend(LocalBackend):
    def __init__(self) -> None:
        self.places: list[np.ndarray] = []

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        return Watched(super().open(directory, name, direct=direct), self.places)


def read(
    committed: Committed,
    rows: slice,
    target: np.ndarray,
    columns: slice = slice(0, 1024),
    backend: LocalBackend | None = None,
) -> None:
    (array,) = committed.manifest.parts[0].arrays
    box = ((rows.start, rows.stop), (columns.start, columns.stop))
    assert len(target) == box_elements(box)
    read_box(backend or LocalBackend(), committed, array, box, target, StoreSettings())


def test_whole_blocks_are_read_into_the_target(saved: Path) -> None:
    committed = open_committed(LocalBackend(), str(saved))
    for rows in (slice(0, 12 * 1024), slice(0, 4096), slice(4096, 8192)):
        target = aligned_buffer((rows.stop - rows.start) * 1024)
        backend = WatchedBackend()
        read(committed, rows, target, backend=backend)
        assert target.tobytes() == VALUES[rows].tobytes()
        assert sum(place.size for place in backend.places) == target.size
        assert all(np.shares_memory(place, target) for place in backend.places)
    backend, target = WatchedBackend(), aligned_buffer(4 * MIB + 64)[64:]  # does not begin on a page
    read(committed, slice(0, 4096), target, backend=backend)
    assert target.tobytes() == VALUES[:4096].tobytes()
    assert backend.places
    assert not any(np.shares_memory(place, target) for place in backend.places)


@given(st.data())
def test_direct_reads_write_nothing_else(saved: Path, data: st.DataObject) -> None:
    edges = st.sampled_from([0, 1, 4, 1000, 1024, 2048, 4000, 4096, 8192, 12 * 1024 - 4, 12 * 1024 - 1, 12 * 1024])
    start, stop = sorted(data.draw(st.tuples(edges, edges).filter(lambda both: both[0] != both[1])))
    columns = data.draw(st.sampled_from([slice(0, 1024), slice(0, 512), slice(1, 1024)]))
    skip = data.draw(st.sampled_from([4096, 64, 1]))
    expected = VALUES[start:stop, columns]
    memory = aligned_buffer(skip + expected.size + 8192)
    memory[:] = FILL
    target = memory[skip : skip + expected.size]
    read(open_committed(LocalBackend(), str(saved)), slice(start, stop), target, columns)
    assert np.array_equal(target.reshape(expected.shape), expected)
    assert (memory[:skip] == FILL).all()
    assert (memory[skip + expected.size :] == FILL).all()


def test_damage_is_found_in_direct_reads(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"x": VALUES})
    flip_a_payload_byte(tmp_path / "a")
    committed = open_committed(LocalBackend(), str(tmp_path / "a"))
    with pytest.raises(jct.CorruptCheckpointError, match="leaf 'x'"):
        read(committed, slice(0, 12 * 1024), aligned_buffer(12 * MIB))
