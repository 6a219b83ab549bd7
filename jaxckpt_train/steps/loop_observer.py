"""Who watches the loop of this process: told what it goes on from, and of each update it has completed."""

from __future__ import annotations

from typing import Any, Protocol

from jaxckpt_train.steps.loop_state import LoopState
from jaxckpt_train.steps.manager import StepManager


class LoopObserver(Protocol):
    """What is called on the loop's thread, within the calls of its callback; what it raises, those raise."""

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """The loop goes on with `values`, restored from `manager.restored_step` (None: it begins anew).

        Returns:
            What the loop is given in their place; its callback keeps `values`.
        """

    def told(self, manager: StepManager, loop: LoopState) -> None:
        """The loop has told of the update `loop.step`; nothing of it is saved yet."""

    def polled(self) -> None:
        """The loop calls `ckpt.poll()`, as an evaluation does."""


_observer: LoopObserver | None = None


def observe(observer: LoopObserver | None) -> None:
    """Have the loops of this process watched from now on; None: by nobody."""
    global _observer
    _observer = observer


def resumed(manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
    """See LoopObserver.resumed."""
    return values if _observer is None else _observer.resumed(manager, values)


def told(manager: StepManager, loop: LoopState) -> None:
    """See LoopObserver.told."""
    if _observer is not None:
        _observer.told(manager, loop)


def polled() -> None:
    """See LoopObserver.polled."""
    if _observer is not None:
        _observer.polled()
