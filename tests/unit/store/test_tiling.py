"""The check of tilings, compared with counting every element, and its running time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store import boxes as boxes_module
from jaxckpt_train.store.boxes import Box, check_tiling
from tests.support.in_time import in_time
from tests.support.strategies import boxes_in, shapes, tilings
from tests.support.tiers import nightly_after


@pytest.fixture(params=["few", "many"], autouse=True, scope="module")
def _both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with the check for few boxes, and with the check for many."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "many":
            patch.setattr(boxes_module, "_FEW_BOXES", 0)
        yield


def inside(array: np.ndarray, box: Box) -> np.ndarray:
    return array[(*(slice(*side) for side in box), ...)]


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, most_cuts=40))))
def test_recursive_splits_are_tilings(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    check_tiling(boxes, shape, "leaf")


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=3))
def test_uneven_grids_are_tilings(widths: list[list[int]]) -> None:
    edges = [list(itertools.accumulate(width, initial=0)) for width in widths]
    boxes = list(itertools.product(*(list(itertools.pairwise(edge)) for edge in edges)))
    check_tiling(boxes, [edge[-1] for edge in edges], "leaf")


def test_pinwheel_is_a_tiling() -> None:
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    check_tiling(pinwheel, (3, 3), "leaf")
    many = [tuple((a + 3 * n, b + 3 * n) if d == 0 else (a, b) for d, (a, b) in enumerate(box)) for n in range(9)
            for box in pinwheel]  # fmt: skip
    check_tiling(many, (27, 3), "leaf")
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        check_tiling([*many[:-1], many[0]], (27, 3), "leaf")


@given(shapes(3, 5).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, 30), st.randoms())))
def test_missing_extra_or_moved_box_is_refused(case: tuple[tuple[int, ...], list[Box], object]) -> None:
    shape, boxes, chance = case
    chosen_box = chance.randrange(len(boxes))  # type: ignore[attr-defined]
    rest = boxes[:chosen_box] + boxes[chosen_box + 1 :]
    with pytest.raises(CorruptCheckpointError, match="leaf: boxes cover"):
        check_tiling(rest, shape, "leaf")
    with pytest.raises(CorruptCheckpointError, match=r"leaf: boxes .* overlap"):
        check_tiling([*boxes, boxes[chosen_box]], shape, "leaf")
    for axis in range(len(shape)):
        start, stop = boxes[chosen_box][axis]
        for bad in ((start, stop + shape[axis]), (start - stop - 1, stop), (start, start), (stop, start)):
            moved = (*boxes[chosen_box][:axis], bad, *boxes[chosen_box][axis + 1 :])
            with pytest.raises(CorruptCheckpointError, match="outside shape"):
                check_tiling([*rest, moved], shape, "leaf")
    with pytest.raises(CorruptCheckpointError, match="outside"):
        check_tiling([*rest, (*boxes[chosen_box], (0, 1))], shape, "leaf")


@given(shapes(3, 4).flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=24))))
def test_verdict_equals_counting_every_element(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        inside(counts, box)[...] += 1
    if (counts == 1).all():
        check_tiling(boxes, shape, "leaf")
    elif not boxes or (counts <= 1).all():
        with pytest.raises(CorruptCheckpointError, match=f"boxes cover {counts.sum()} of {counts.size}"):
            check_tiling(boxes, shape, "leaf")
    else:
        expected = "overlap" if (counts >= 1).all() else "overlap|boxes cover"
        with pytest.raises(CorruptCheckpointError, match=expected):
            check_tiling(boxes, shape, "leaf")


def test_a_0_d_array_is_one_box() -> None:
    check_tiling([()], (), "leaf")
    with pytest.raises(CorruptCheckpointError, match="cover 0 of 1"):
        check_tiling([], (), "leaf")
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        check_tiling([(), ()], (), "leaf")


@pytest.mark.parametrize(("side", "dimensions"), [(2, 13), (96, 2)], ids=["hypercube", "plane"])
def test_many_boxes_take_less_than_quadratic_time(side: int, dimensions: int) -> None:
    boxes: list[Box] = [tuple((i, i + 1) for i in c) for c in itertools.product(range(side), repeat=dimensions)]
    with in_time(2.5):  # comparing all pairs takes 3 s and more on any machine
        check_tiling(boxes, (side,) * dimensions, "leaf")


@given(shapes(4, 6).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, 30))), st.data())
def test_sizes_that_add_up_are_not_enough(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """One box moves to the place of another of its size: the sum of the sizes stays equal, the coverage does not."""
    shape, boxes = case
    at, to = (data.draw(st.integers(0, len(boxes) - 1)) for _ in range(2))
    sizes = [stop - start for start, stop in boxes[at]]
    room = all(size <= stop - start for size, (start, stop) in zip(sizes, boxes[to], strict=True))
    if at == to or not room:
        return
    moved = tuple((start, start + size) for size, (start, _) in zip(sizes, boxes[to], strict=True))
    with pytest.raises(CorruptCheckpointError, match=r"leaf: boxes .* overlap|but not element"):
        check_tiling([*boxes[:at], moved, *boxes[at + 1 :]], shape, "leaf")


def test_uncovered_element_is_named() -> None:
    boxes: list[Box] = [((row, row + 1), (column, column + 5)) for row in range(9) for column in (0, 5)]
    boxes[7] = ((3, 4), (5, 9))
    with pytest.raises(CorruptCheckpointError, match=r"89 of 90 .*element \(3, 9\)"):
        check_tiling(boxes, (9, 10), "leaf")


def spiral(side: int) -> list[Box]:
    """Return strips around a square, inwards: each plane cuts off one box."""
    at, boxes = 0, list[Box]()
    while side - at > 1:
        boxes += [((at, at + 1), (at, side)), ((at + 1, side), (at, at + 1))]
        at += 1
    return [*boxes, ((at, side), (at, side))]


def pinwheels(side: int) -> list[Box]:
    """Return nested pinwheels: no plane cuts off a box."""
    a, b, boxes = 0, side, list[Box]()
    while b - a > 2:
        boxes += [
            ((a, a + 1), (a, b - 1)),
            ((a, b - 1), (b - 1, b)),
            ((b - 1, b), (a + 1, b)),
            ((a + 1, b), (a, a + 1)),
        ]
        a, b = a + 1, b - 1
    return [*boxes, ((a, b), (a, b))]


def in_many_dimensions(side: int) -> list[Box]:
    """Return the spiral on two of fifty axes."""
    return [(*box, *((0, 1) for _ in range(48))) for box in spiral(side)]


@pytest.mark.parametrize("make", nightly_after(1, [spiral, pinwheels, in_many_dimensions]))
@pytest.mark.parametrize("variant", ["sound", "one too few", "one too many", "all the same"])
def test_layouts_made_to_take_long_take_bounded_time(make: Callable[[int], list[Box]], variant: str) -> None:
    side = 12_000
    boxes = make(side)
    shape = (side, side) + (1,) * (len(boxes[0]) - 2)
    whole = {"sound": boxes, "one too few": boxes[:-1], "one too many": [*boxes, boxes[len(boxes) // 2]]}
    chosen = whole.get(variant) or boxes[:1] * len(boxes)
    with in_time(2.5):  # comparing all pairs takes 4 s and more on any machine
        try:
            check_tiling(chosen, shape, "leaf")
        except CorruptCheckpointError:
            assert variant != "sound"
        else:
            assert variant == "sound"
