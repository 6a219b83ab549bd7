"""Box arithmetic, compared with numpy on small arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxckpt_train.store.boxes import (
    Box,
    box_elements,
    box_from_index,
    box_shape,
    element_span,
    full_box,
    intersect,
    is_contiguous_within,
    row_major_range,
    slices_within,
)
from tests.support.strategies import boxes_in, shapes


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


@given(shapes(4, 9).flatmap(boxes_in), st.data())
def test_element_range_is_split_into_ordered_boxes(box: Box, data: st.DataObject) -> None:
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
