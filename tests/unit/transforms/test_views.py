"""Views: each box that is computed during a read equals that part of the whole array made by numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box, slices_within
from jaxckpt_train.store.manifest import ChunkRecord
from jaxckpt_train.transforms import views
from jaxckpt_train.transforms.views import Cast, Joined, Padded, Reshaped, Sliced, Stored, Transposed, View

Both = tuple[View, np.ndarray]


def stored(array: np.ndarray, most_bytes: int = 1 << 20) -> Stored:
    """A stored array of a checkpoint, in chunks of a limited size."""
    boxes = [box for box in cut_box(full_box(array.shape), array.itemsize, most_bytes) if array.size]
    chunks = [ChunkRecord(box, number, 0, 1, f"of {box}") for number, box in enumerate(boxes)]

    def read(box: Box, target: np.ndarray) -> None:
        assert target.shape == box_shape(box)
        target[...] = array[slices_within(box, full_box(array.shape))]

    return Stored(array.shape, array.dtype, chunks, read)


@st.composite
def made(draw: Any) -> Both:
    """A view of several operations, and the array that numpy makes of the same operations."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) + draw(st.integers(0, 9))
    view: View = stored(array, draw(st.sampled_from([4, 20, 1 << 20])))
    for _ in range(draw(st.integers(0, 3))):
        view, array = draw(st.sampled_from(OPERATIONS))(draw, view, array)
    return view, array


def transpose(draw: Any, view: View, array: np.ndarray) -> Both:
    axes = draw(st.permutations(range(array.ndim)))
    return Transposed(view, axes), array.transpose(axes)


def cast(draw: Any, view: View, array: np.ndarray) -> Both:
    dtype = np.dtype(draw(st.sampled_from(["int32", "float32", "int64"])))
    return Cast(view, dtype, "an array"), array.astype(dtype)


def cut(draw: Any, view: View, array: np.ndarray) -> Both:
    box = []
    for size in array.shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    dropped = [axis for axis, (start, stop) in enumerate(box) if stop - start == 1 and array.ndim > 1][: array.ndim - 1]
    dropped = dropped if draw(st.booleans()) else []
    part = array[tuple(slice(*side) for side in box)]
    return Sliced(view, tuple(box), dropped), part.reshape(
        [n for axis, n in enumerate(part.shape) if axis not in dropped]
    )


def join(draw: Any, view: View, array: np.ndarray) -> Both:
    other = array[::-1].copy() + 100
    new = draw(st.booleans())
    axis = draw(st.integers(0, array.ndim - (0 if new else 1)))
    joined = np.stack([array, other], axis) if new else np.concatenate([array, other], axis)
    return Joined([view, stored(other, 20)], axis, new=new), joined


def pad(draw: Any, view: View, array: np.ndarray) -> Both:
    more = [draw(st.integers(0, 2)) for _ in array.shape]
    padded = np.pad(array, [(0, each) for each in more], constant_values=7)
    return Padded(view, padded.shape, np.asarray(7, view.dtype)), padded


def reshape(draw: Any, view: View, array: np.ndarray) -> Both:
    first = draw(st.sampled_from([n for n in range(1, array.size + 1) if array.size % n == 0]))
    shape = (first, array.size // first) if draw(st.booleans()) else (array.size,)
    return Reshaped(view, shape), array.reshape(shape)


OPERATIONS = [transpose, cast, cut, join, pad, reshape]


@given(made(), st.data(), st.sampled_from([8, 64, 1 << 24]))
def test_every_box_is_what_numpy_makes(both: Both, data: Any, piece_bytes: int) -> None:
    view, array = both
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "PIECE_BYTES", piece_bytes)
        assert (view.shape, view.dtype) == (array.shape, array.dtype)
        covered = np.zeros(array.shape, int)
        for piece in view.pieces():
            place = slices_within(piece.box, full_box(array.shape))
            covered[place] += 1
            found = np.empty(box_shape(piece.box), view.dtype)
            view.read(piece.box, found)
            assert np.array_equal(found, array[place])
            if piece.stored is None:
                assert found.nbytes <= max(piece_bytes, view.dtype.itemsize)
        assert (covered == 1).all(), "the pieces do not tile the array"
        box = []
        for size in array.shape:
            start = data.draw(st.integers(0, size))
            box.append((start, data.draw(st.integers(start, size))))
        found = np.empty(box_shape(tuple(box)), view.dtype)
        if found.size:
            view.read(tuple(box), found)
            assert np.array_equal(found, array[tuple(slice(*side) for side in box)])


def test_pieces_of_a_widening_cast_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "PIECE_BYTES", 8)
    narrow = stored(np.zeros((2, 4), np.int8))
    wide = Cast(narrow, np.dtype(np.int64), "w")
    assert [box_elements(piece.box) for piece in wide.pieces()] == [1] * 8


@given(made())
def test_stored_pieces_equal_their_chunks(both: Both) -> None:
    """Stored chunks are copied with their digests, so their bytes must be those of the piece."""
    view, array = both
    inner: dict[str, np.ndarray] = {}

    def collect(each: Any) -> None:
        if isinstance(each, Stored):
            for chunk in each.chunks:
                found = np.empty(box_shape(chunk.box), each.dtype)
                each.read(chunk.box, found)
                inner.setdefault(f"{id(each)} {chunk.digests}", found)
        for other in getattr(each, "_inner", []) if isinstance(each, Joined) else [getattr(each, "_inner", None)]:
            if other is not None:
                collect(other)

    collect(view)
    kept = {found.tobytes() for found in inner.values()}
    for piece in view.pieces():
        if piece.stored is not None:
            assert array[slices_within(piece.box, full_box(array.shape))].tobytes() in kept


def test_joined_and_sliced_layers_stay_stored_chunks() -> None:
    layers = [np.full((3, 4), number, np.float32) for number in range(4)]
    stacked = Joined([stored(layer) for layer in layers], 0, new=True)
    assert all(piece.stored is not None for piece in stacked.pieces())
    second = Sliced(stacked, ((1, 2), (0, 3), (0, 4)), (0,))
    (piece,) = second.pieces()
    assert piece.stored is not None
    assert piece.box == full_box((3, 4))
