"""Boxes: every function against numpy on small arrays, and tilings that must and must not be believed."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.boxes import (
    Box,
    box_elements,
    box_from_index,
    box_shape,
    check_tiling,
    element_span,
    full_box,
    intersect,
    is_contiguous_within,
    row_major_range,
    slices_within,
)
from tests.store.strategies import boxes_in, shapes, tilings


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes())
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def inside(array: np.ndarray, box: Box) -> np.ndarray:
    return array[(*(slice(*side) for side in box), ...)]


@given(two_boxes())
def test_the_intersection_holds_the_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    common = intersect(a, b)
    expected = np.intersect1d(inside(numbered(shape), a), inside(numbered(shape), b))
    found = np.array([], int) if common is None else inside(numbered(shape), common).ravel()
    assert sorted(found) == sorted(expected)
    assert intersect(b, a) == common


@given(two_boxes())
def test_slices_span_and_contiguity_agree_with_numpy(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, outer, other = case
    inner = intersect(outer, other)
    assume(inner is not None)
    assert inner is not None
    array = numbered(shape)
    held = inside(array, outer).copy(order="C")
    assert np.array_equal(held[(*slices_within(inner, outer), ...)], inside(array, inner))
    places = np.flatnonzero(np.isin(held.ravel(), inside(array, inner)))
    assert element_span(inner, outer) == (places[0], places[-1] + 1)
    assert is_contiguous_within(inner, outer) == (places[-1] + 1 - places[0] == len(places))
    assert box_elements(inner) == len(places)
    assert box_shape(inner) == inside(array, inner).shape


@given(two_boxes())
def test_a_box_comes_back_from_slices(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, box, _ = case
    assert box_from_index(tuple(slice(*side) for side in box), shape) == box
    assert box_from_index(tuple(slice(None) for _ in shape), shape) == full_box(shape)


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, most_cuts=40))))
def test_recursive_splits_are_tilings(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    check_tiling(boxes, shape, "leaf")


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=3))
def test_uneven_grids_are_tilings(widths: list[list[int]]) -> None:
    edges = [list(itertools.accumulate(width, initial=0)) for width in widths]
    boxes = list(itertools.product(*(list(itertools.pairwise(edge)) for edge in edges)))
    check_tiling(boxes, [edge[-1] for edge in edges], "leaf")


def test_a_tiling_that_no_plane_cuts_is_one() -> None:
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    check_tiling(pinwheel, (3, 3), "leaf")
    many = [tuple((a + 3 * n, b + 3 * n) if d == 0 else (a, b) for d, (a, b) in enumerate(box)) for n in range(9)
            for box in pinwheel]  # fmt: skip
    check_tiling(many, (27, 3), "leaf")
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        check_tiling([*many[:-1], many[0]], (27, 3), "leaf")


@given(shapes(3, 5).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, 30), st.randoms())))
def test_one_box_too_few_too_many_or_moved_is_refused(case: tuple[tuple[int, ...], list[Box], object]) -> None:
    shape, boxes, chance = case
    victim = chance.randrange(len(boxes))  # type: ignore[attr-defined]
    rest = boxes[:victim] + boxes[victim + 1 :]
    with pytest.raises(CorruptCheckpointError, match="leaf: boxes cover"):
        check_tiling(rest, shape, "leaf")
    with pytest.raises(CorruptCheckpointError, match=r"leaf: boxes .* overlap"):
        check_tiling([*boxes, boxes[victim]], shape, "leaf")
    for axis in range(len(shape)):
        start, stop = boxes[victim][axis]
        for bad in ((start, stop + shape[axis]), (start - stop - 1, stop), (start, start), (stop, start)):
            moved = (*boxes[victim][:axis], bad, *boxes[victim][axis + 1 :])
            with pytest.raises(CorruptCheckpointError, match=r"leaf: box .* is empty or lies outside shape"):
                check_tiling([*rest, moved], shape, "leaf")
    with pytest.raises(CorruptCheckpointError, match="lies outside"):
        check_tiling([*rest, (*boxes[victim], (0, 1))], shape, "leaf")


@given(shapes(3, 4).flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=24))))
def test_any_boxes_are_judged_as_counting_every_element_would(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        inside(counts, box)[...] += 1
    if (counts == 1).all():
        check_tiling(boxes, shape, "leaf")
    else:
        with pytest.raises(CorruptCheckpointError, match=r"overlap|boxes cover"):
            check_tiling(boxes, shape, "leaf")


def test_a_0_d_array_is_one_box() -> None:
    check_tiling([()], (), "leaf")
    with pytest.raises(CorruptCheckpointError, match="cover 0 of 1"):
        check_tiling([], (), "leaf")
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        check_tiling([(), ()], (), "leaf")


@pytest.mark.parametrize(("side", "dimensions"), [(2, 13), (96, 2)], ids=["hypercube", "plane"])
def test_thousands_of_boxes_take_no_square_of_their_number(side: int, dimensions: int) -> None:
    boxes: list[Box] = [tuple((i, i + 1) for i in c) for c in itertools.product(range(side), repeat=dimensions)]
    started = time.process_time()
    check_tiling(boxes, (side,) * dimensions, "leaf")
    assert time.process_time() - started < 2.5  # comparing all pairs takes 3 s and more on any machine


@given(shapes(4, 9).flatmap(boxes_in), st.data())
def test_a_range_of_elements_is_a_few_boxes_in_their_order(box: Box, data: st.DataObject) -> None:
    elements = box_elements(box)
    first, last = sorted((data.draw(st.integers(0, elements - 1)), data.draw(st.integers(1, elements))))
    assume(first < last)
    parts, at = list(row_major_range(box, first, last)), first
    for part in parts:
        assert intersect(part, box) == part
        assert is_contiguous_within(part, box)
        assert element_span(part, box) == (at, at + box_elements(part))
        at += box_elements(part)
    assert at == last
    assert len(parts) <= max(1, 2 * len(box) - 1)
