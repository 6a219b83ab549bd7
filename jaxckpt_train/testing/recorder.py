"""Records what the loop of this process does, and interrupts it for real in the update that is asked for."""

from __future__ import annotations

import signal
import threading
from typing import Any

from jaxckpt_train.checkpointables.fingerprint import DATA_NAME
from jaxckpt_train.steps.loop_state import LoopState
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.testing.fingerprints import batch_of, host_random, leaves_of, metrics_of
from jaxckpt_train.testing.observed_data import can_be_observed, observed, plain
from jaxckpt_train.testing.record_files import Plan, RecordWriter
from jaxckpt_train.testing.records import Batch, Resumed, Stopped, Update


class InterruptedRunError(Exception):
    """The error that ends a run by `how="raise"`; a loop should let it through."""


class Recorder:
    """The observer of the loop of a watched process.

    Args:
        writer: of the records.
        plan: what the process does.
    """

    def __init__(self, writer: RecordWriter, plan: Plan) -> None:
        self._writer, self._plan = writer, plan
        self._thread = threading.get_ident()
        self._batches: list[Batch] = []
        self._elsewhere = 0

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """Record it, and have the data watched."""
        self._thread = threading.get_ident()
        leaves = leaves_of({name: value for name, value in values.items() if name != DATA_NAME}, self._writer.keep)
        self._writer.add(Resumed(manager.restored_step, manager.directory, tuple(values), leaves, host_random()))
        data = values.get(DATA_NAME)
        return {**values, DATA_NAME: observed(data, self._took)} if can_be_observed(data) else values

    def _took(self, element: Any) -> None:
        if threading.get_ident() == self._thread:
            self._batches.append(batch_of(element))
        else:
            self._elsewhere += 1

    def told(self, manager: StepManager, loop: LoopState) -> None:
        """Record the update; in the one that is asked for, interrupt the run."""
        assert loop.last is not None
        loop.last = {name: plain(value) for name, value in loop.last.items()}
        saved = {name: value for name, value in loop.last.items() if name != DATA_NAME}
        if loop.step == self._plan.values_from:
            self._writer.values_are_wanted()
        update = Update(
            loop.step,
            tuple(self._batches),
            self._elsewhere,
            metrics_of(loop.metrics),
            leaves_of(saved, self._writer.keep),
            host_random(),
        )
        self._writer.add(update)
        self._batches, self._elsewhere = [], 0
        if loop.step == self._plan.stop_at:
            self._interrupt(manager)

    def _interrupt(self, manager: StepManager) -> None:
        """End the run as planned. A kill waits for the save under way, so that each proof resumes at the same step."""
        if self._plan.how == "kill":
            manager.wait()
        self._writer.add(Stopped(self._plan.stop_at or 0))
        if self._plan.how == "raise":
            raise InterruptedRunError(
                f"interrupted in update {self._plan.stop_at}, to see whether the run resumes exactly"
            )
        signal.raise_signal(signal.SIGKILL if self._plan.how == "kill" else signal.SIGTERM)
