"""A data iterator in epochs for Keras' `fit`, of which it is known at each moment where the training stands in it."""

from __future__ import annotations

import copy
import sys
from typing import Any

import keras  # type: ignore[import-untyped]

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.value_checks import whole


class EpochData(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of an iterator, so many in each epoch. They are taken one after the other, whatever index is asked for.

    Keras may read ahead (on accelerators by a batch, and a batch or two before it trains): the position is that after
    the batches that were trained on. An iterator that ends begins anew.

    Args:
        source: a data set or loader of Grain, or an iterator with `get_state` and `set_state`.
        steps_per_epoch: batches in each epoch; None: as many as `len(source)`.

    Attributes:
        iterator: of the source.

    Raises:
        SettingsError: it has no position that could be saved, or no length.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__(workers=1)  # more of them, or processes, would take batches elsewhere and in any order
        self._steps = whole(1)("data: steps_per_epoch", steps_per_epoch or _length(source))
        self.iterator = source if hasattr(source, "get_state") else iter(source)
        if not (hasattr(self.iterator, "get_state") and hasattr(self.iterator, "set_state")):
            raise SettingsError(
                f"data: expected a Grain data set or loader, or an iterator with get_state and set_state, found a "
                f"{type(source).__name__}: Keras' own data is given to fit as it is"
            )
        self._left: int = self._steps
        self._start = self._now()
        self._before: dict[int, Any] = {}  # states of the iterator after so many batches, where more were taken
        self.begin()

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, or those that are left of the one that was resumed."""
        return self._left

    def __getitem__(self, index: int) -> Any:
        """The next batch."""
        if self._taken > self._trained:
            self._before[self._taken] = self._now()
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.iterator.set_state(copy.deepcopy(self._start))
            batch = next(self.iterator)
        self._taken += 1
        return tuple(batch) if isinstance(batch, list) else batch

    def resumed(self, batches: int) -> None:
        """Of the epoch that begins so many batches were trained on before."""
        self._left = self._steps - batches

    def on_epoch_end(self) -> None:
        """The next epoch is a whole one."""
        self._left = self._steps

    def trained(self, batches: int) -> None:
        """So many more were trained on."""
        self._trained += batches
        self._before = {count: state for count, state in self._before.items() if count >= self._trained}

    def position(self) -> Any:
        """What is to be saved: the iterator, or what stands for it as it was after the batches trained on."""
        is_ahead = self._taken > self._trained
        return ReadAhead(self.iterator, self._before[self._trained]) if is_ahead else self.iterator

    def rewind(self) -> None:
        """Go back to after the batches trained on: others were only looked at.

        Raises:
            SettingsError: it is not known where that is.
        """
        if self._taken > self._trained:
            if self._trained not in self._before:
                raise SettingsError("data: a training was broken off within an update; make the data anew")
            self.iterator.set_state(self._before[self._trained])
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on, at the position where the iterator is now."""
        self._taken = self._trained = 0
        self._before = {0: self._now()}

    def _now(self) -> Any:
        return copy.deepcopy(self.iterator.get_state())  # some keep what they have given, and change it


class ReplayedDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """A PyDataset that changes from epoch to epoch, such as by a shuffle in `on_epoch_end`, and can be resumed.

    Args:
        source: new, as in a process that has not trained yet.
        steps_per_epoch: None.

    Attributes:
        ended: how many epochs have ended, one before the first included.

    Raises:
        SettingsError: it has no end, another number of steps is wanted, or Keras would read it by workers, which take
            batches of the next epoch before its order is known.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__()
        found = {
            "one without an end": source.num_batches is None,
            f"steps_per_epoch={steps_per_epoch!r}": steps_per_epoch is not None,
            f"workers={source.workers}": source.workers > 1,
            "use_multiprocessing=True": source.workers > 0 and source.use_multiprocessing,
        }
        if any(found.values()):
            wrong = ", ".join(name for name, is_so in found.items() if is_so)
            raise SettingsError(
                f"data: expected a PyDataset that is an epoch by itself and is read by one thread, found {wrong}; "
                "where its order does not matter, give it to fit as it is"
            )
        self._source, self.ended, self._has_begun = source, 0, False

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return int(self._source.num_batches)

    def __getitem__(self, index: int) -> Any:
        """The batch that the source has there now."""
        return self._source[index]

    def on_epoch_begin(self) -> None:
        """Tell the source."""
        self._has_begun = True
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the source, but not once more at the begin of each further `fit`, as Keras does."""
        if self._has_begun or not self.ended:
            self._source.on_epoch_end()
            self.ended += 1
        self._has_begun = False

    def replay(self, ended: int) -> None:
        """Bring the source to its state after this number of ended epochs. Keras ends one before the first, too.

        Raises:
            SettingsError: it is beyond that.
        """
        while self.ended < ended:
            self.on_epoch_begin()
            self.on_epoch_end()
        if self.ended > ended:
            raise SettingsError("data: this PyDataset has been trained with before; make it anew for each training")


def _length(source: Any) -> int:
    length = len(source) if hasattr(source, "__len__") else sys.maxsize
    if length >= sys.maxsize:
        raise SettingsError(
            f"data: steps_per_epoch: expected a number of batches, since this {type(source).__name__} has no end"
        )
    return length


class ReadAhead:
    """An iterator as it was before it was read ahead, for who saves its state: of the same class, with that state."""

    def __init__(self, iterator: Any, state: Any) -> None:
        self._iterator, self._state = iterator, state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def get_state(self) -> Any:
        """The state that it had."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Not what this is for.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("a position that was saved is not set; set the iterator")
