"""Where there is too much, the item that stands out among its neighbours stays."""

from __future__ import annotations

import pytest

from jaxckpt_train.report.limits import Limits
from jaxckpt_train.report.thinning import thinned


def test_few_items_all_stay() -> None:
    assert thinned([3, 1, 2], 3, float) == [3, 1, 2]
    assert thinned([], 3, float) == []


@pytest.mark.parametrize("most", [1, 2, 7, 99])
def test_of_many_the_greatest_of_each_group_stays_in_order(most: int) -> None:
    items = [(number, number * 37 % 101) for number in range(100)]
    found = thinned(items, most, lambda item: item[1])
    assert len(found) == most
    assert found == sorted(found)
    assert max(items, key=lambda item: item[1]) in found


def test_each_group_of_neighbours_has_one_that_stays() -> None:
    assert thinned([0, 9, 1, 1, 7, 2], 3, float) == [9, 1, 7]


def test_half_of_everything_is_never_nothing() -> None:
    limits = Limits(saves=1, steps=9, leaves=20_000)
    assert (limits.halved().saves, limits.halved().steps, limits.halved().leaves) == (1, 4, 10_000)
