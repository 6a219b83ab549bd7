"""Which segments of the checkpoint before are taken over, by a backend in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import reuse, writer
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.reuse import Unchanged, WrittenBefore, steady_arrays
from jaxckpt_train.store.segment import ArraySource, ChunkSource
from jaxckpt_train.store.threads import shared_workers
from jaxckpt_train.store.writer import WrittenArrays, write_arrays
from tests.support.memory_backend import MemoryBackend

LARGE = 1 << 18  # float32, a MiB


class Later:
    """An array elsewhere, which can be fetched once."""

    def __init__(self, data: np.ndarray) -> None:
        self._data: np.ndarray | None = data
        self.shape, self.dtype, self.size, self.nbytes = data.shape, data.dtype, data.size, data.nbytes

    def fetch(self) -> np.ndarray:
        assert self._data is not None, "fetched twice"
        data, self._data = self._data, None
        return data

    @property
    def is_fetched(self) -> bool:
        return self._data is None

    def leave(self) -> None:
        self._data = None


def sources(values: Mapping[str, np.ndarray], *, later: bool) -> list[ArraySource]:
    return [
        ArraySource(name, data.shape, data.dtype, [ChunkSource(full_box(data.shape), Later(data) if later else data)])
        for name, data in values.items()
    ]


class Saves:
    """Saves one after another, each of which knows the one before."""

    def __init__(self, *, later: bool = False) -> None:
        self.backend, self.later = MemoryBackend(), later
        self.before: WrittenBefore | None = None
        self.number = 0

    def save(self, values: Mapping[str, np.ndarray], *, verified: bool = False, **known: Any) -> WrittenArrays:
        self.number += 1
        directory = f"/step{self.number}"
        self.backend.make_directory(f"{directory}/state", parents=True, sync=False)
        written = write_arrays(
            self.backend,
            directory,
            "state",
            sources(values, later=self.later),
            StoreSettings(),
            first_segment=3,
            known=Unchanged(self.before, **{name: frozenset(each) for name, each in known.items()}),
            taken_from=self.backend if verified else None,
        )
        steady = steady_arrays(self.before, written.arrays)
        self.before = WrittenBefore(
            directory,
            dict(enumerate(written.segments, 3)),
            {each.name: each for each in written.arrays},
            steady,
            frozenset(range(3, 3 + written.taken)),
        )
        self.check(directory, values, written)
        return written

    def check(self, directory: str, values: Mapping[str, np.ndarray], written: WrittenArrays) -> None:
        segments = dict(enumerate(written.segments, 3))
        for array in written.arrays:
            (chunk,) = array.chunks
            source = self.backend.open(directory, segments[chunk.segment].file, direct=False)
            data = np.zeros(source.size, np.uint8)
            source.read_into(0, data, source.size)
            found = data[chunk.offset : chunk.offset + chunk.length]
            assert found.tobytes() == values[array.name].tobytes(), array.name


def values(step: int, base: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "base": np.full(LARGE, base, np.float32),
        "norm": np.full(7, base, np.float32),
        "w": np.full(1000, step, np.float32),
    }


@pytest.mark.parametrize("later", [False, True])
def test_frozen_arrays_are_written_once(later: bool) -> None:
    saves = Saves(later=later)
    assert saves.save(values(1), frozen=["base", "norm"]).taken == 0
    written = saves.save(values(2), frozen=["base", "norm"])
    assert written.taken_bytes > 4 * LARGE > 100 * written.data_bytes > 0


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("damage", ["header", "data", "cut", "gone"])
def test_damaged_file_is_written_again(later: bool, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    saves, frozen = Saves(later=later), ["base", "norm"]
    saves.save(values(1), frozen=frozen)
    assert saves.save(values(2), frozen=frozen, verified=True).taken == 1
    assert saves.before is not None
    (number,) = saves.before.taken
    path = f"/step2/{saves.before.segments[number].file}"
    with contextlib.closing(saves.backend.open("/step2", saves.before.segments[number].file, direct=False)) as source:
        whole = np.empty(source.size, np.uint8)
        source.read_into(0, whole, source.size)
    saves.backend.remove(path)
    if damage != "gone":
        whole[{"header": 9, "data": -1, "cut": 0}[damage]] ^= damage != "cut"
        sink = saves.backend.create(path, direct=False)
        sink.write_at(0, whole[: len(whole) - (damage == "cut")])
        sink.finish(len(whole) - (damage == "cut"), sync=False)
    assert saves.save(values(3), frozen=frozen, verified=True).taken == 0
    assert ("is written again" in caplog.text) == (damage != "gone")  # it may be on another host
    assert saves.save(values(4), frozen=frozen, verified=True).taken == 1


def test_comparison_holds_little_of_what_it_has_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many files, only the last array has changed."""
    most = 8 * LARGE
    for module in (reuse, writer):
        monkeypatch.setattr(module, "APART_BYTES", most)
    names = [f"base{number:02d}" for number in range(16)]
    before = {name: np.zeros(LARGE, np.float32) for name in names}
    now = before | {name: np.ones(LARGE, np.float32) for name in names[1::2]}
    saves = Saves(later=True)
    assert len(saves.save(before, frozen=names).segments) == 8
    arrays, workers = sources(now, later=True), shared_workers(1, "jaxckpt-write")
    found = reuse.Sources(arrays, Unchanged(saves.before, frozenset(), frozenset(names)), "xxh3-128", workers)
    assert not any(found.is_same(each) for each in found.candidates())
    chunks: list[Any] = [chunk.data for array in arrays for chunk in array.chunks]
    assert 0 < sum(each.nbytes for each in chunks if each.is_fetched) <= 4 * most
    assert saves.save(now, frozen=names).taken == 0


@pytest.mark.parametrize("later", [False, True])
def test_steady_arrays_move_to_files_of_their_own(later: bool) -> None:
    saves = Saves(later=later)
    taken = [saves.save(values(step)).taken for step in range(1, 6)]
    assert taken == ([0, 0, 0, 1, 1] if later else [0, 0, 1, 1, 1])
    assert saves.save(values(6, base=2.0)).taken == 0
    taken = [saves.save(values(step, base=2.0)).taken for step in range(7, 11)]
    assert taken == [0, 0, 1, 1]


def test_same_arrays_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Saves(later=True)
    saves.save(values(1), frozen=["base", "norm"])
    monkeypatch.setattr(Later, "fetch", lambda self: pytest.fail("it was read"))
    assert saves.save(values(1), same=["base", "norm", "w"]).taken == 2


def test_settled_arrays_share_their_file_with_no_other() -> None:
    saves = Saves()
    saves.save(values(1), frozen=["base", "norm"])
    saves.save(values(1), frozen=["base", "norm"], same=["w"])
    assert saves.before is not None
    assert saves.before.settled(frozenset({"base", "norm", "other"})) == {"base", "norm"}
    assert saves.before.settled(frozenset({"base", "w"})) == {"w"}


def test_arrays_are_settled_only_where_their_file_was_taken_over() -> None:
    saves = Saves()
    for is_settled in (False, True, True):
        saves.save(values(1), frozen=["base", "norm"])
        assert saves.before is not None
        assert saves.before.settled(frozenset({"base", "norm"})) == ({"base", "norm"} if is_settled else set())


def test_few_unchanged_bytes_get_no_file_of_their_own() -> None:
    saves = Saves()
    few = {"a": np.ones(100, np.float32), "b": np.zeros(50_000, np.float32)}
    for step in range(4):
        written = saves.save({**few, "w": np.full(1000, step, np.float32)}, same=["a"])
        assert len(written.segments) == 1


def test_other_shape_or_missing_array_is_no_candidate() -> None:
    saves = Saves()
    frozen = ["base", "norm"]
    saves.save(values(1), frozen=frozen)
    assert saves.save({**values(2), "norm": np.ones((7, 1), np.float32)}, frozen=frozen).taken == 0
    saves.save(values(3), frozen=frozen)
    without = values(4)
    del without["norm"]
    assert saves.save(without, frozen=frozen).taken == 0
    assert saves.save(without, frozen=frozen).taken == 1


def test_restored_checkpoint_is_compared() -> None:
    saves = Saves()
    saves.save(values(1), frozen=["base", "norm"])
    assert saves.before is not None
    saves.before = WrittenBefore(saves.before.directory, saves.before.segments, saves.before.arrays)
    assert saves.save(values(2)).taken == 1
    assert saves.save(values(3)).taken == 1
