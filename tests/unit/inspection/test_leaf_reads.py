"""Pieces of checkpoints that are read ahead: all arrive in order and unchanged, and a hung disk times out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointTimeoutError, CorruptCheckpointError
from jaxckpt_train.inspection import diff as leaf_reads
from jaxckpt_train.inspection.diff import Wanted, over_pieces, pieces_of
from jaxckpt_train.inspection.runs import open_at
from jaxckpt_train.opened import Opened
from jaxckpt_train.store import copy as read_ahead
from jaxckpt_train.store import threads
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import flip_a_payload_byte

MIB = 1 << 20


@pytest.fixture
def trees() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two trees of the same structure: large leaves, small ones that are not read ahead, and an empty one."""
    random = np.random.default_rng(2)

    def one() -> dict[str, np.ndarray]:
        large = {f"{number}_large": random.integers(0, 256, (9, MIB), np.uint8) for number in range(4)}
        small = {f"{number}_small_{again}": random.standard_normal(7) for number in range(4) for again in range(9)}
        return {**large, **small, "2_nothing": np.zeros((0, 3))}

    return one(), one()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_reads, "PIECE_BYTES", 2 * MIB)


def opened_of(path: Path, tree: dict[str, np.ndarray], backend: LocalBackend | None = None) -> Opened:
    jct.save(path, tree)
    return open_at(backend or LocalBackend(), str(path))


def wanted_of(*opened: Opened) -> Iterator[Wanted]:
    arrays = [each.arrays() for each in opened]
    for name in arrays[0]:
        yield from pieces_of(name, [each[name] for each in arrays])


def test_pieces_arrive_in_requested_order(tmp_path: Path, small_pieces: None, trees: Any) -> None:
    pair = [opened_of(tmp_path / name, tree) for name, tree in zip("ab", trees, strict=True)]
    asked = list(wanted_of(*pair))
    found = list(over_pieces(pair, iter(asked)))  # all are kept, so none of their memory may be reused
    assert [each for each, _ in found] == asked
    assert len(found) == 4 * 5 + 4 * 9
    for wanted, arrays in found:
        name = wanted.name.rpartition("/")[2]
        place = tuple(slice(first, last) for first, last in wanted.box)
        for array, tree in zip(arrays, trees, strict=True):
            assert array.tobytes() == tree[name][place].tobytes()


def test_memory_of_released_pieces_is_reused(tmp_path: Path, small_pieces: None) -> None:
    opened = opened_of(tmp_path / "a", {"x": np.ones((64, MIB), np.uint8)})
    places = {arrays[0].ctypes.data for _, arrays in over_pieces([opened], wanted_of(opened))}
    assert len(places) <= leaf_reads.AT_ONCE + 3


def test_damage_is_reported_for_its_piece(tmp_path: Path, small_pieces: None, trees: Any) -> None:
    pair = [opened_of(tmp_path / name, tree) for name, tree in zip("ab", trees, strict=True)]
    flip_a_payload_byte(tmp_path / "b")
    with pytest.raises(CorruptCheckpointError, match=rf"^{tmp_path / 'b'}/.* of leaf '\d_(large|small_\d)'"):
        list(over_pieces(pair, wanted_of(*pair)))


class _Held:
    """A source whose reads on helper threads return only when `answers` is set."""

    def __init__(self, source: Source, answers: threading.Event) -> None:
        self._source, self._answers = source, answers
        self.size, self.alignment, self.close = source.size, source.alignment, source.close

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        if threading.current_thread().name == "jaxckpt-ask" and data.nbytes >= MIB:
            assert self._answers.wait(60)
        self._source.read_into(offset, data, needed)


class _HeldBackend(LocalBackend):
    def __init__(self) -> None:
        self.answers = threading.Event()

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        return _Held(super().open(directory, name, direct=direct), self.answers)


def test_reads_from_hung_disk_time_out(tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(read_ahead, "POLL_S", 0.05)
    backend = _HeldBackend()
    opened = opened_of(tmp_path / "a", {"x": np.ones((64, MIB), np.uint8)}, backend)
    try:
        with pytest.raises(CheckpointTimeoutError, match=f"^{tmp_path / 'a'}: no progress for"):
            list(over_pieces([opened], wanted_of(opened)))
    finally:
        backend.answers.set()


class _CountingBackend(LocalBackend):
    def __init__(self) -> None:
        self.opened = 0

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        self.opened += 1
        return super().open(directory, name, direct=direct)


def test_small_leaves_are_read_together(tmp_path: Path) -> None:
    tree = {f"n{number:04d}": np.full(4, number) for number in range(3000)}
    opened = opened_of(tmp_path / "a", tree, backend := _CountingBackend())
    backend.opened = 0
    found = {wanted.name: arrays[0].tobytes() for wanted, arrays in over_pieces([opened], wanted_of(opened))}
    assert found == {f"state/{name}": value.tobytes() for name, value in tree.items()}
    assert backend.opened < 30
