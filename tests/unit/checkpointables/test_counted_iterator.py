"""CountedIterator: data without a position of its own continues where the saved loop was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct

RECORDS = np.arange(40)


def shuffled(start: int) -> Iterator[np.ndarray]:
    """Batches of 8 records, in another order in each epoch."""
    for number in itertools.count(start):
        epoch, position = divmod(number, 5)
        order = np.random.default_rng([7, epoch]).permutation(len(RECORDS))
        yield RECORDS[order[position * 8 : (position + 1) * 8]]


def drawn(start: int) -> Iterator[float]:
    for number in itertools.count(start):
        yield np.random.default_rng([3, number]).random()


def counted_from_the_start(start: int) -> Iterator[int]:
    """A generator that can only start at the beginning: items before `start` are drawn and dropped."""
    return itertools.islice((n * n for n in itertools.count()), start, None)


@pytest.mark.parametrize("items_from", [shuffled, drawn, counted_from_the_start])
@pytest.mark.parametrize("stop", [1, 5, 7])
def test_resumed_data_is_that_of_one_run(tmp_path: Path, items_from: Any, stop: int) -> None:
    def train(directory: Path, num_steps: int) -> list[bytes]:
        seen = []
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            state, data = ckpt.resume({"w": jnp.zeros(())}, jct.CountedIterator(items_from))
            for _ in ckpt.steps(num_steps):
                seen.append(np.asarray(next(data)).tobytes())
                ckpt(state)
            assert data.taken == num_steps
        return seen

    whole = train(tmp_path / "whole", 12)
    assert train(tmp_path / "parts", stop) + train(tmp_path / "parts", 12) == whole
    assert len(set(whole)) == 12


def test_prefetched_items_do_not_count(tmp_path: Path) -> None:
    made = []

    def ahead(start: int) -> Iterator[int]:
        made.append(start)
        window = [start, start + 1, start + 2]
        while True:
            window.append(window[-1] + 1)
            yield window.pop(0)

    data = jct.CountedIterator(ahead)
    assert [next(data), next(data)] == [0, 1]
    jct.save_checkpointables(tmp_path / "c", {"data": data})
    other = jct.CountedIterator(ahead)
    assert jct.load_checkpointables(tmp_path / "c", {"data": other})["data"] is other
    assert next(other) == 2
    assert made == [0, 2]


def test_data_shorter_than_position_ends_at_once() -> None:
    data = jct.CountedIterator(lambda start: iter(range(start, 3)))
    data.set_state({"taken": 5})
    with pytest.raises(StopIteration):
        next(data)
    assert data.taken == 5


@pytest.mark.parametrize("state", [None, 3, {}, {"taken": -1}, {"taken": 1.0}, {"taken": True}, {"taken": 1, "x": 2}])
def test_a_position_of_other_data_is_refused(state: Any) -> None:
    data = jct.CountedIterator(drawn)
    next(data)
    with pytest.raises(jct.IteratorStateError):
        data.set_state(state)
    assert data.taken == 1


def test_an_iterator_instead_of_a_function_is_refused() -> None:
    with pytest.raises(jct.SettingsError):
        jct.CountedIterator(iter([1]))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Python iterable type")  # JAX warns when it checks whether they are trees
@pytest.mark.parametrize(
    "data", [iter([1]), (number for number in range(3)), zip([1], [2], strict=True), lambda: iter([1])]
)
def test_data_without_position_suggests_counted_iterator(tmp_path: Path, data: Any) -> None:
    with jct.CheckpointCallback(tmp_path) as ckpt, pytest.raises(jct.UnsupportedLeafError, match="CountedIterator"):
        ckpt.resume({"w": jnp.zeros(1)}, data)
    assert not jct.StepManager(tmp_path).steps
