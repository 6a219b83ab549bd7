"""Too many items: the newest stay in memory, and the greatest one of each group of neighbours is drawn."""

from __future__ import annotations

import pytest

from jaxckpt_train.report.series import MOST_KEPT, Limits, Newest, thinned


def test_few_items_all_stay() -> None:
    assert thinned([3, 1, 2], 3, float) == [3, 1, 2]
    assert thinned([], 3, float) == []


@pytest.mark.parametrize("most", [1, 2, 7, 99])
def test_greatest_of_many_stays_in_order(most: int) -> None:
    items = [(number, number * 37 % 101) for number in range(100)]
    found = thinned(items, most, lambda item: item[1])
    assert len(found) == most
    assert found == sorted(found)
    assert max(items, key=lambda item: item[1]) in found


def test_greatest_of_each_group_stays() -> None:
    assert thinned([0, 9, 1, 1, 7, 2], 3, float) == [9, 1, 7]


def test_halved_limits_stay_above_zero() -> None:
    limits = Limits(saves=1, steps=9, leaves=20_000)
    assert (limits.halved().saves, limits.halved().steps, limits.halved().leaves) == (1, 4, 10_000)


@pytest.mark.parametrize("count", [0, 1, MOST_KEPT, MOST_KEPT + 1])
def test_newest_items_of_a_stream_stay(count: int) -> None:
    newest = Newest[int]()
    for item in range(count):
        newest.add(item)
    assert [*newest.items] == [*range(count)][-MOST_KEPT:]
    assert newest.count == count
