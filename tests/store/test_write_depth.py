"""How many writes are under way: measured once per disk, the default unless another number is clearly faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import write_depth
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.layout import ArraySource, ChunkSource
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.write_depth import CANDIDATES, TURN_BYTES, WriteDepth, best_of, write_depth_of
from jaxckpt_train.store.writer import write_arrays
from tests.store.strict_backend import PAGE, StrictBackend, small_sizes

LARGE = 7 * TURN_BYTES
DEFAULT = CANDIDATES[0]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    yield from small_sizes()


class Clock:
    """Stands in for the module's `time`; a write at a depth takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(write_depth, "time", self)

    def perf_counter(self) -> float:
        return self.now


def walk(depth: WriteDepth, total: int, clock: Clock, seconds: dict[int, float]) -> list[int]:
    taken = []
    for turn in depth.turns(total):
        taken.append(turn.depth)
        clock.now += seconds[turn.depth]
    return taken


def test_the_first_large_save_tries_every_number_twice_and_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, clock = WriteDepth(), Clock(monkeypatch)
    seconds = {2: 3.0, 4: 1.5, 8: 1.0}
    assert walk(depth, LARGE, clock, seconds) == [2, 4, 8, 8, 4, 2, 8]
    assert walk(depth, LARGE, clock, seconds) == [8]
    assert walk(depth, 1, clock, seconds) == [8]


def test_what_happens_only_once_happens_before_the_first_turn() -> None:
    assert [turn.begins_measuring for turn in WriteDepth().turns(LARGE)] == [True] + 6 * [False]
    assert [turn.begins_measuring for turn in WriteDepth().turns(1)] == [False]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({2: 1.0, 4: 1.0, 8: 1.0}, 2),
        ({2: 1.0, 4: 0.9, 8: 0.81}, 2),
        ({2: 1.0, 4: 0.7, 8: 0.9}, 4),
        ({2: 1.0, 4: 0.7, 8: 0.3}, 8),
        ({2: 0.1, 4: 0.7, 8: 0.3}, 2),
    ],
)
def test_a_small_difference_is_chance(seconds: dict[int, float], best: int) -> None:
    assert best_of(seconds) == best


def test_a_small_save_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, clock = WriteDepth(), Clock(monkeypatch)
    assert walk(depth, 6 * TURN_BYTES, clock, {2: 1.0}) == [DEFAULT]
    assert walk(depth, LARGE, clock, {2: 3.0, 4: 1.0, 8: 2.0})[-1] == 4


def test_a_second_save_meanwhile_measures_nothing() -> None:
    depth = WriteDepth()
    first = depth.turns(LARGE)
    next(first)
    assert [turn.depth for turn in depth.turns(LARGE)] == [DEFAULT]
    assert len(list(first)) == 6


def test_a_save_that_fails_leaves_the_measuring_to_the_next() -> None:
    depth = WriteDepth()
    failing = depth.turns(LARGE)
    next(failing)
    failing.close()
    assert len(list(depth.turns(LARGE))) == 7


class Counting(StrictBackend):
    """Counts how many writes are under way; those of `slow` depths take longer on the clock."""

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
    settings = StoreSettings(staging_bytes=36 * PAGE, **chosen)
    (segment,) = write_arrays(backend, f"/runs/{name}", "state", arrays, settings, first_segment=0).segments
    data = bytes(backend._nodes[f"/runs/{name}/{segment.file}"].data)
    assert len(data) == segment.bytes
    return data[segment.header_bytes :]


def test_a_save_that_measures_writes_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_depth, "TURN_BYTES", 20 * PAGE)
    backend = Counting()
    content = np.random.default_rng(0).integers(0, 256, 300 * PAGE + 17, np.uint8)
    assert written(backend, "a", content) == content.tobytes()
    assert max(backend.most) <= max(CANDIDATES)
    assert write_depth_of(backend.volume("/runs/a"))._best in CANDIDATES


def test_the_number_in_the_settings_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_depth, "TURN_BYTES", PAGE)
    backend = Counting()
    content = np.zeros(300 * PAGE, np.uint8)
    assert written(backend, "a", content, io_threads=1) == content.tobytes()
    assert set(backend.most) == {1}
    assert write_depth_of(backend.volume("/runs/a"))._best is None


def test_a_refusal_while_measuring_is_raised_and_measured_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_depth, "TURN_BYTES", 20 * PAGE)
    backend = Counting()
    content = np.random.default_rng(0).integers(0, 256, 300 * PAGE, np.uint8)
    backend.refuses = True
    with pytest.raises(StorageError, match="No space left"):
        written(backend, "a", content)
    assert write_depth_of(backend.volume("/runs/a"))._best is None
    backend.refuses = False
    assert written(backend, "b", content) == content.tobytes()
    assert write_depth_of(backend.volume("/runs/a"))._best is not None


def test_directories_of_one_disk_share_what_is_known(tmp_path: Any) -> None:
    (tmp_path / "a").mkdir()
    disk = LocalBackend()
    assert write_depth_of(disk.volume(str(tmp_path))) is write_depth_of(disk.volume(str(tmp_path / "a")))
    assert write_depth_of("elsewhere") is not write_depth_of(disk.volume(str(tmp_path)))


def test_one_of_several_saves_at_once_measures() -> None:
    depth, measured = WriteDepth(), list[int]()
    together = threading.Barrier(4, timeout=30)

    def save() -> None:
        turns = depth.turns(LARGE)
        next(turns)
        together.wait()
        measured.append(1 + len(list(turns)))

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(measured) == [1, 1, 1, 7]
