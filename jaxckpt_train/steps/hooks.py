"""The callback as a hook for loops that call `hook(step)` after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.value_checks import index_of, refuse, whole


class LoopHook:
    """Called after each update, with the number that the loop has for it.

    Args:
        callback: the CheckpointCallback.
        get_state: returns the state to save.
        get_metrics: returns the metrics of the update; None: there are none.
        first_step: the number with which the loop calls its hooks after the very first update: 1, or 0 where it counts
            from 0.

    Raises:
        SettingsError: `first_step` is neither 0 nor 1, or no function was given.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        get_state: Callable[[], Any],
        get_metrics: Callable[[], Mapping[str, Any] | None] | None = None,
        first_step: int = 1,
    ) -> None:
        self._callback, self._get_state, self._get_metrics = callback, get_state, get_metrics
        _check_function("as_hook: get_state", "returns the state", get_state)
        if get_metrics is not None:
            _check_function("as_hook: get_metrics", "returns metrics, or None", get_metrics)
        self._first_step = whole(0, 1)("as_hook: first_step", first_step)

    def __call__(self, step: int, t: float | None = None) -> bool:
        """Tell that an update is complete.

        Args:
            step: its number, as the loop counts.
            t: the time, which other hooks use and this one does not.

        Returns:
            Whether the step is being saved.

        Raises:
            SettingsError: the number is none, or below that of the first update.
        """
        number = index_of(step)
        if number is None:
            refuse("hook(step)", "the number of the update, a whole number", step)
        completed = number + 1 - self._first_step
        if completed < 1:
            raise SettingsError(
                f"hook({number}): expected {self._first_step} after the first update, or more after a later one: each "
                "step would be saved under the label of the one before; for a loop that counts from 0 make the hook by "
                "as_hook(get_state, first_step=0)"
            )
        metrics = None if self._get_metrics is None else self._get_metrics()
        return bool(self._callback(self._get_state(), metrics=metrics, step=completed).saved)


def _check_function(subject: str, does: str, found: object) -> None:
    if not callable(found):  # a whole state is no good text
        kind = type(found).__name__
        raise SettingsError(f"{subject}: expected a function without arguments that {does}, found one {kind}")
