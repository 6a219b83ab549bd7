"""A shutdown without a run: its manager has nothing to save and only records what it is asked."""

from __future__ import annotations

from typing import Any, cast

import jaxckpt_train as jct
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.manager import StepManager
from jaxckpt_train.preemption.shutdown import GracefulShutdown


class FakeManager:
    """The manager of a run whose last committed step is 7."""

    settings = jct.StoreSettings()
    latest = 7

    def leave_early_s(self, limit_s: float) -> float:
        return 0.0

    def ends_as(self, how: str) -> None: ...

    def note_preemption(self, step: int, reason: str, plan: str | None) -> None: ...


def shutdown_of(job: Coordinator | None = None, **options: Any) -> GracefulShutdown:
    """Return a shutdown with these notices and limits."""
    return GracefulShutdown(cast("StepManager", FakeManager()), job or Coordinator(), **options)


class Time:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
