"""Boxes read into memory of the caller: the right bytes, and no other memory changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes
from tests.support.checkpoints import commit
from tests.support.strategies import arrays, boxes_in, tilings
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes

pytestmark = pytest.mark.timeout(60)

EMPTY = 0xEE


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, list[Box]], list[Box], StoreSettings]:
    found = {f"leaf{number}": draw(arrays()) for number in range(draw(st.integers(1, 4)))}
    cuts = {name: draw(tilings(array.shape)) for name, array in found.items() if array.size}
    boxes = [
        draw(st.one_of(st.just(full_box(array.shape)), boxes_in(array.shape))) if array.size else full_box(array.shape)
        for array in found.values()
    ]
    chosen = StoreSettings(
        read_budget_bytes=draw(st.sampled_from([1, 4 * PAGE, 64 * PAGE])), io_threads=draw(st.integers(1, 3))
    )
    return found, cuts, boxes, chosen


def bytes_of(array: np.ndarray, box: Box) -> bytes:
    cut = array[(*(slice(*side) for side in box), ...)]
    return cut.astype(cut.dtype.newbyteorder("<"), order="C").tobytes()


@settings(max_examples=150)
@given(loads(), st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=4, max_size=4))
def test_boxes_with_a_target_are_read_into_it(load: Any, how: list[tuple[bool, bool, int]]) -> None:
    found, cuts, boxes, chosen = load
    backend, wanted, rooms = StrictBackend(), list[Wanted](), dict[int, np.ndarray]()
    committed = commit(backend, "/runs/a", found, StoreSettings(segment_bytes=5000), boxes=cuts)
    for number, array in enumerate(committed.manifest.parts[0].arrays):
        has_target, passes, odd = how[number]
        wants = Wanted(array, [boxes[number]], passing=passes)
        if has_target:
            size = len(bytes_of(found[array.name], boxes[number]))
            rooms[number] = np.full(odd + size + 8, EMPTY, np.uint8)
            wants = wants._replace(target=rooms[number][odd : odd + size], passing=False)
        wanted.append(wants)
    left = set(range(len(wanted)))
    with contextlib.closing(iter_boxes(backend, committed, wanted, chosen)) as reading:
        for number, index, data in reading:
            left.remove(number)
            right, target = bytes_of(found[wanted[number].array.name], boxes[number]), wanted[number].target
            assert index == 0
            assert data.tobytes() == right
            if target is not None:
                assert data.size == 0 or data.ctypes.data == target.ctypes.data
                assert data.size == 0 or np.shares_memory(data, target)
                before = how[number][2]
                assert rooms[number].tobytes() == bytes([EMPTY] * before) + right + bytes([EMPTY] * 8)
            else:
                assert not any(np.shares_memory(data, room) for room in rooms.values())
            del data
    assert not left
    assert backend.open_files == 0


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("odd", [0, 1, 64])
def test_damaged_data_does_not_reach_the_target(cut: bool, odd: int) -> None:
    """The undamaged pages are read directly."""
    backend, size = StrictBackend(), 16 * PAGE
    saved = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    cuts = [((0, 5 * PAGE),), ((5 * PAGE, size),)] if cut else [((0, size),)]
    committed = commit(backend, "/runs/a", {"x": saved}, StoreSettings(), boxes={"x": cuts})
    (array,) = committed.manifest.parts[0].arrays
    damaged = next(chunk for chunk in array.chunks if chunk.box[0][1] == size)
    at = damaged.offset + size - 100 - damaged.box[0][0]
    backend._file(f"/runs/a/{committed.manifest.segments[damaged.segment].file}", "damage").data[at] ^= 1
    room = aligned_buffer(16 + odd + size)[16:]  # so that it never begins on a page
    room[:] = EMPTY
    wanted = [Wanted(array, [full_box(array.shape)], target=room[odd:])]
    with (
        pytest.raises(CorruptCheckpointError, match="leaf 'x'"),
        contextlib.closing(iter_boxes(backend, committed, wanted, StoreSettings(io_threads=1))) as reading,
    ):
        list(reading)
    assert np.all(room[odd + size - PAGE :] == EMPTY)
    assert backend.open_files == 0
