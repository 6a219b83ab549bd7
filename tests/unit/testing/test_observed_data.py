"""The wrapper of a loop's data: it reports each element, and otherwise behaves like the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import pytest

from jaxckpt_train.testing.recorder import can_be_observed, observed, plain


class Positioned:
    """An iterator with a position and other members."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Positioned:
        return self

    def __next__(self) -> int:
        if self.position == 3:
            raise StopIteration
        self.position += 1
        return self.position

    def __len__(self) -> int:
        return 3 - self.position

    def get_state(self) -> int:
        return self.position


class Loader:
    """An iterable that is not an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def get_state(self) -> int:
        return 0


def test_each_element_is_recorded_before_the_loop() -> None:
    taken: list[int] = []
    data = observed(Positioned(), taken.append)
    assert next(data) == 1
    assert taken == [1]
    assert [(element, list(taken)) for element in data] == [(2, [1, 2]), (3, [1, 2, 3])]


def test_wrapper_has_the_members_of_data() -> None:
    real = Positioned()
    data: Any = observed(real, lambda element: None)
    assert isinstance(data, Positioned)
    assert repr(data) == repr(real)
    assert iter(data) is data
    next(data)
    assert (data.position, data.get_state(), len(data)) == (1, 1, 2)
    data.position = 3
    assert real.position == 3
    assert list(data) == []
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = data.nothing_such


def test_iterators_of_a_loader_are_observed() -> None:
    taken: list[int] = []
    data = observed(Loader(), taken.append)
    assert not hasattr(data, "__next__")
    assert list(data) + list(data) == taken == [1, 2, 1, 2]


def test_a_grain_iterator_stays_one() -> None:
    taken: list[int] = []
    real = iter(grain.MapDataset.range(4).to_iter_dataset())
    data = observed(real, taken.append)
    assert isinstance(data, grain.DatasetIterator)
    assert [next(data), next(data)] == taken == [0, 1]
    state = data.get_state()
    assert (next(data), data.set_state(state), next(data)) == (2, None, 2)
    assert plain(data) is real
    assert plain(real) is real


@pytest.mark.parametrize(
    ("data", "can"), [(Positioned(), True), (Loader(), True), (iter([1]), True), ({"a": 1}, False), (None, False)]
)
def test_only_sources_of_elements_are_observed(data: Any, can: bool) -> None:
    assert can_be_observed(data) is can
