"""The batches of an epoch that were trained on before: Keras counts them, and no update is done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxckpt_train.errors import SettingsError


class SkippedBatches:
    """Stands for a model's `train_function` until so many batches were counted.

    `fit` has no place to begin within an epoch, and batches have the numbers that they had.

    Args:
        model: of Keras, which begins the epoch.
        batches: how many.
        steps: batches in the epoch; None: not known.
        are_taken: whether they are taken from the data and dropped; else the data is behind them already.

    Raises:
        SettingsError: one execution of several steps would do some of them, and others.
    """

    def __init__(self, model: Any, batches: int, steps: int | None, are_taken: bool) -> None:
        self._model, self._each, self._are_taken = model, int(model.steps_per_execution), are_taken
        if batches % self._each and batches != steps:
            raise SettingsError(
                f"KerasCheckpoint: batch {batches} of an epoch was the last that was trained on; expected "
                f"steps_per_execution to divide that, found {self._each}: compile the model as before"
            )
        self._left = math.ceil(batches / self._each)
        self._logs: dict[str, Any] = model.get_metrics_result()

    def install(self) -> None:
        """Begin."""
        self._function, self._model.train_function = self._model.train_function, self

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        """What `train_function` gives: the logs, which are those of the batch trained on last, and the state."""
        if self._left == 0:
            self._model.train_function = self._function
            return self._function(state, iterator)
        self._left -= 1
        for _ in range(self._each if self._are_taken else 0):
            next(iterator, None)
        return dict(self._logs), state
