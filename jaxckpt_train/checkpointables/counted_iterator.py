"""CountedIterator: a position in data that cannot tell its own, as the number of items taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from jaxckpt_train.errors import IteratorStateError, SettingsError

T = TypeVar("T")


class CountedIterator(Generic[T]):
    """An iterator over any data that saves its position as the number of items taken so far.

    For data without `get_state` and `set_state`: `tf.data`, PyTorch loaders, generators, NumPy arrays. After a resume
    the data goes on with the first item that the saved loop had not taken, if `items_from(n)` gives the same items in
    every process that runs it: derive shuffles and random numbers from a seed and the item's number.

    In a job of several processes each counts its own items; where all have taken equally many, as in a loop that takes
    one item for each update, a job of another number of processes can resume.

    Args:
        items_from: called with a number n, gives the items from the n-th on (the first is number 0). Called when the
            first item is taken, and again after a restore.

    Raises:
        SettingsError: `items_from` cannot be called.

    For example:

        def batches(start):
            for number in itertools.count(start):
                epoch, position = divmod(number, len(images) // 64)
                order = np.random.default_rng([seed, epoch]).permutation(len(images))
                yield images[order[position * 64 : (position + 1) * 64]]

        state, data = ckpt.resume(state, CountedIterator(batches))
    """

    def __init__(self, items_from: Callable[[int], Iterable[T]]) -> None:
        if not callable(items_from):
            raise SettingsError(
                f"CountedIterator: expected a function that gives the items from a number on, found {items_from!r:.100}"
            )
        self._items_from = items_from
        self._items: Iterator[T] | None = None
        self._taken = 0

    @property
    def taken(self) -> int:
        """How many items were taken."""
        return self._taken

    def __iter__(self) -> CountedIterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            self._items = iter(self._items_from(self._taken))
        item = next(self._items)
        self._taken += 1
        return item

    def __repr__(self) -> str:
        return f"CountedIterator({self._items_from!r}, taken={self._taken})"

    def get_state(self) -> dict[str, int]:
        """The position: {"taken": number of items taken}."""
        return {"taken": self._taken}

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` gave.

        Raises:
            IteratorStateError: it is no such position.
        """
        taken = state.get("taken") if isinstance(state, dict) and len(state) == 1 else None
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise IteratorStateError(
                f"CountedIterator: expected a position as {{'taken': 12}}, found {state!r:.200}; the checkpoint was "
                "saved with other data: use that, or leave the data out of what is restored"
            )
        self._taken, self._items = taken, None
