"""Too many items are thinned: of each group of neighbours, the greatest one stays."""

from __future__ import annotations

import itertools

import pytest

from jaxckpt_train.report.series import BATCH, RECENT, Limits, Sample, thinned


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


def test_the_recent_items_all_stay() -> None:
    assert thinned([0, 9, 1, 1, 7, 2, 3, 4], 3, float, recent=2) == [9, 1, 7, 3, 4]
    assert thinned([4, 3, 2, 1], 3, float, recent=1) == [4, 3, 2, 1]


def sample_of(count: int, most: int) -> Sample[int]:
    sample = Sample[int](lambda item: item * 37 % 1009, most)
    for item in range(count):
        sample.add(item)
    return sample


@pytest.mark.parametrize("count", [0, 1, RECENT, BATCH + RECENT, 2 * BATCH])
def test_a_short_stream_is_kept_whole(count: int) -> None:
    sample = sample_of(count, BATCH)
    assert (sample.items, sample.count, len(sample)) == ([*range(count)], count, count)


@pytest.mark.parametrize(("count", "most"), [(50_000, 100), (50_001, 3000), (123_457, 1000), (40_000, 1)])
def test_long_stream_has_even_groups(count: int, most: int) -> None:
    sample = sample_of(count, most)
    items = sample.items
    assert sample.count == count
    assert len(items) == len(sample) <= 2 * most + BATCH + 2 * RECENT
    assert items[-RECENT:] == [*range(count - RECENT, count)]
    assert items == sorted(set(items))
    older = items[:-RECENT]
    assert max(after - before for before, after in itertools.pairwise(older)) <= 2 * (BATCH + 2 * count // most)


def test_outliers_stay_in_any_stream() -> None:
    sample = Sample[float](float, most=50)
    for number in range(60_000):
        sample.add(1e9 if number == 777 else number % 10)
    assert 1e9 in sample.items
