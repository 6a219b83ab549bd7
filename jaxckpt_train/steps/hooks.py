"""The callback as a hook for loops that call `hook(step)` after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoopHook:
    """Called with the number of completed updates after each of them.

    Args:
        callback: the CheckpointCallback.
        get_state: returns the state to save.
    """

    def __init__(self, callback: Callable[..., Any], get_state: Callable[[], Any]) -> None:
        self._callback, self._get_state = callback, get_state

    def __call__(self, step: int, t: float | None = None) -> bool:
        """Tell that `step` updates are complete.

        Args:
            step: number of completed updates.
            t: the time, which other hooks use and this one does not.

        Returns:
            Whether the step is being saved.
        """
        return bool(self._callback(self._get_state(), step=step).saved)
