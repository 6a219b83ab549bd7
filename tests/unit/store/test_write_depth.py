"""The number of concurrent writes: measured once per disk; the default stays unless another is clearly faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import writer
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.segment import ArraySource, ChunkSource
from jaxckpt_train.store.threads import PerProcess
from jaxckpt_train.store.writer import (
    CANDIDATES,
    TURN_BYTES,
    StagingPool,
    WriteDepth,
    best_of,
    write_arrays,
    write_depth_for,
)
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes

LARGE = 20 * TURN_BYTES
DEFAULT = CANDIDATES[0]
STAGING = 36 * PAGE


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    yield from small_sizes()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk in memory is identified by its address, which the disk of the next test may share."""
    monkeypatch.setattr(writer, "_known", PerProcess(writer._unmeasured))


class Disk:
    """A simulated disk with a clock, a speed for each depth, and turns of whole buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float], total: int = LARGE) -> None:
        self.now, self.left, self.speeds = 0.0, total, speeds
        self.depths, self.asked = list[int](), list[int | None]()
        self.prepared = 0
        monkeypatch.setattr(writer, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def prepare(self) -> None:
        self.prepared += 1
        self.now += 1000.0  # must not count in a measurement

    def write(self, depth: int, most_bytes: int | None) -> int:
        self.depths.append(depth)
        self.asked.append(most_bytes)
        buffer = TURN_BYTES // (depth + 1)
        done = self.left if most_bytes is None else min(self.left, -(-most_bytes // buffer) * buffer + buffer)
        self.left -= done
        self.now += done / self.speeds[depth]
        return done

    def save(self, depth: WriteDepth) -> list[int]:
        self.depths.clear()
        total = self.left
        self.write(depth.choose(total, self.write, self.prepare), None)
        assert self.left == 0
        self.left = total
        return list(self.depths)


def test_first_large_save_measures_and_keeps_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, disk = WriteDepth(), Disk(monkeypatch, {2: 1e9, 4: 2e9, 8: 3e9})
    assert disk.save(depth) == [2, 4, 8, 8, 4, 2, 8]
    assert disk.prepared == 1
    assert disk.save(depth) == [8]
    assert disk.prepared == 1
    disk.left = 1
    assert disk.save(depth) == [8]


def test_indifferent_disk_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns end with whole buffers, and fewer buffers are larger; this must not bias the measurement."""
    depth, disk = WriteDepth(), Disk(monkeypatch, dict.fromkeys(CANDIDATES, 1e9))
    assert disk.save(depth) == [2, 4, 8, 8, 4, 2, DEFAULT]
    assert disk.save(depth) == [DEFAULT]


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({2: 1.0, 4: 1.0, 8: 1.0}, 2),
        ({2: 1.0, 4: 1.2, 8: 1.25}, 2),
        ({2: 1.0, 4: 1.5, 8: 1.2}, 4),
        ({2: 1.0, 4: 1.5, 8: 3.0}, 8),
        ({2: 9.0, 4: 1.5, 8: 3.0}, 2),
    ],
)
def test_a_small_difference_is_chance(speeds: dict[int, float], best: int) -> None:
    assert best_of(speeds) == best


def test_a_small_save_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, disk = WriteDepth(), Disk(monkeypatch, {2: 1e9, 4: 3e9, 8: 2e9}, 2 * TURN_BYTES - 1)
    assert disk.save(depth) == [DEFAULT]
    assert disk.prepared == 0
    disk.left = LARGE
    assert disk.save(depth)[-1] == 4


def test_small_saves_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the checkpointables of one step, which are written in sequence."""
    depth, disk = WriteDepth(), Disk(monkeypatch, {2: 1e9, 4: 3e9, 8: 2e9}, 4 * TURN_BYTES)
    seen = [disk.save(depth) for _ in range(4)]
    assert [turn for one in seen for turn in one[:-1]] == [2, 4, 8, 8, 4, 2]
    assert (seen[0][-1], seen[-1]) == (DEFAULT, [4])


def test_unfinished_measurement_is_left_to_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, disk = WriteDepth(), Disk(monkeypatch, {2: 1e9, 4: 3e9, 8: 2e9})
    disk.left = 3 * TURN_BYTES
    depth.choose(LARGE, disk.write, disk.prepare)  # with large buffers, few turns write everything
    assert disk.left == 0
    assert depth._best is None
    disk.left = LARGE
    assert disk.save(depth)[-1] == 4


def test_a_second_save_meanwhile_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, disk = WriteDepth(), Disk(monkeypatch, {2: 1e9, 4: 3e9, 8: 2e9})
    inner = list[int]()

    def write(number: int, most_bytes: int | None) -> int:
        if not inner:
            inner.append(depth.choose(LARGE, pytest.fail, pytest.fail))
        return disk.write(number, most_bytes)

    assert depth.choose(LARGE, write, disk.prepare) == 4
    assert inner == [DEFAULT]
    assert disk.depths == [2, 4, 8, 8, 4, 2]


def small_turns(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(writer, "TURN_BYTES", size)


class Counting(StrictBackend):
    """Record the number of concurrent writes, and refuse writes on request."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.refuses = 0, list[int](), False

    def create(self, path: str, *, direct: Any) -> Any:
        sink = super().create(path, direct=direct)
        inner = sink.write_at

        def write_at(offset: int, data: np.ndarray) -> None:
            if self.refuses:
                raise StorageError(28, "cannot write: No space left on device", path)
            with self.count_lock:
                self.now += 1
                self.most.append(self.now)
            try:
                inner(offset, data)
            finally:
                with self.count_lock:
                    self.now -= 1

        sink.write_at = write_at
        return sink


def written(backend: Any, name: str, content: np.ndarray, **chosen: Any) -> bytes:
    backend.make_directory(f"/runs/{name}/state", parents=True, sync=False)
    arrays = [ArraySource("x", content.shape, content.dtype, [ChunkSource(full_box(content.shape), content)])]
    settings = StoreSettings(staging_bytes=STAGING, **chosen)
    (segment,) = write_arrays(backend, f"/runs/{name}", "state", arrays, settings, first_segment=0).segments
    data = bytes(backend._nodes[f"/runs/{name}/{segment.file}"].data)
    assert len(data) == segment.bytes
    return data[segment.header_bytes :]


def known(backend: StrictBackend, direct: Any = "auto") -> int | None:
    return write_depth_for((backend.volume("/runs/a"), direct), STAGING)._best


def test_a_save_that_measures_writes_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_turns(monkeypatch, 20 * PAGE)
    backend = Counting()
    content = np.random.default_rng(0).integers(0, 256, 300 * PAGE + 17, np.uint8)
    assert written(backend, "a", content) == content.tobytes()
    assert max(backend.most) <= max(CANDIDATES)
    assert known(backend) in CANDIDATES


def test_memory_is_touched_only_before_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    small_turns(monkeypatch, 20 * PAGE)
    backend, touched = Counting(), list[int]()
    monkeypatch.setattr(StagingPool, "touch", lambda pool: touched.append(len(backend.most)))
    content = np.zeros(300 * PAGE, np.uint8)
    written(backend, "a", content, io_threads=1)
    assert touched == []
    written(Counting(), "a", content[: 20 * PAGE])
    assert touched == []
    backend = Counting()
    written(backend, "a", content)
    written(backend, "b", content)
    assert touched == [0]


def test_configured_number_of_threads_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    small_turns(monkeypatch, PAGE)
    backend = Counting()
    content = np.zeros(300 * PAGE, np.uint8)
    assert written(backend, "a", content, io_threads=1) == content.tobytes()
    assert set(backend.most) == {1}
    assert known(backend) is None


def test_failed_measurement_is_raised_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    small_turns(monkeypatch, 20 * PAGE)
    backend = Counting()
    content = np.random.default_rng(0).integers(0, 256, 300 * PAGE, np.uint8)
    backend.refuses = True
    with pytest.raises(StorageError, match="No space left"):
        written(backend, "a", content)
    assert known(backend) is None
    backend.refuses = False
    assert written(backend, "b", content) == content.tobytes()
    assert known(backend) is not None


def test_cached_and_direct_writes_are_measured_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    small_turns(monkeypatch, 20 * PAGE)
    backend = Counting()
    content = np.zeros(300 * PAGE, np.uint8)
    written(backend, "a", content, direct_io=False)
    assert known(backend, False) in CANDIDATES
    assert known(backend) is None
    written(backend, "b", content)
    assert known(backend) in CANDIDATES


def test_directories_of_one_disk_share_measurements(tmp_path: Any) -> None:
    (tmp_path / "a").mkdir()
    disk = LocalBackend()
    here = write_depth_for(disk.volume(str(tmp_path)), STAGING)
    assert here is write_depth_for(disk.volume(str(tmp_path / "a")), STAGING)
    assert here is not write_depth_for(disk.volume(str(tmp_path)), 2 * STAGING)
    assert here is not write_depth_for("elsewhere", STAGING)


def test_turn_covers_all_large_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, disk = WriteDepth(4 * TURN_BYTES), Disk(monkeypatch, dict.fromkeys(CANDIDATES, 1e9))
    disk.save(depth)
    asked = [most for most in disk.asked if most is not None]
    assert set(asked) == {4 * TURN_BYTES}
