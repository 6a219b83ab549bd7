"""Records what the loop of this process does, and interrupts it for real in the update that is asked for."""

from __future__ import annotations

import signal
import threading
from typing import Any

from jaxckpt_train.checkpointables.fingerprint import DATA_NAME
from jaxckpt_train.checkpointables.registry import keeps_itself_current
from jaxckpt_train.steps.loop_state import LoopState
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.testing.fingerprints import batch_of, host_random, kept_nowhere, leaves_of, metrics_of
from jaxckpt_train.testing.observed_data import can_be_observed, observed, plain
from jaxckpt_train.testing.record_files import Plan, RecordWriter
from jaxckpt_train.testing.records import Batch, Between, Leaves, Resumed, Stopped, Update


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
        self._last_step, self._is_between, self._polled = 0, False, False
        self._in_place: dict[str, Any] = {}  # of the last update, what the loop may change without handing it over
        self._leaves: Leaves = {}

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """Record it, and have the data watched."""
        self._thread = threading.get_ident()
        leaves = leaves_of({name: value for name, value in values.items() if name != DATA_NAME}, self._writer.keep)
        self._writer.add(Resumed(manager.restored_step, manager.directory, tuple(values), leaves, host_random()))
        data = values.get(DATA_NAME)
        return {**values, DATA_NAME: observed(data, self._took)} if can_be_observed(data) else values

    def _took(self, element: Any) -> None:
        if threading.get_ident() == self._thread:
            self._end_between(looks=True)
            self._batches.append(batch_of(element))
        else:
            self._elsewhere += 1

    def polled(self) -> None:
        """Record that it is called between two updates."""
        self._polled = True

    def _end_between(self, looks: bool) -> None:
        """The next update begins, or (`looks` is false) is complete already: record what was seen before it."""
        if not self._is_between:
            return
        self._is_between = False
        now, before = leaves_of(self._in_place, kept_nowhere) if looks else {}, self._leaves
        changed = tuple(name for name, leaf in now.items() if name in before and not leaf.same(before[name]))
        if self._polled or changed:
            self._writer.add(Between(self._last_step, self._polled, changed))

    def told(self, manager: StepManager, loop: LoopState) -> None:
        """Record the update; in the one that is asked for, interrupt the run."""
        assert loop.last is not None
        self._end_between(looks=False)
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
            self._interrupt(manager, loop)
        self._last_step, self._is_between, self._polled = loop.step, True, False
        self._in_place = {name: value for name, value in saved.items() if keeps_itself_current(value)}
        self._leaves = update.leaves

    def _interrupt(self, manager: StepManager, loop: LoopState) -> None:
        """End the run as planned. A kill waits for the save under way, so that each proof resumes at the same step."""
        if self._plan.saves_first and self._plan.how != "preempt":
            manager.save(loop.step, loop.last or {}, force=True)
        if self._plan.how == "kill":
            manager.wait()
        self._writer.add(Stopped(self._plan.stop_at or 0))
        if self._plan.how == "raise":
            raise InterruptedRunError(
                f"interrupted in update {self._plan.stop_at}, to see whether the run resumes exactly"
            )
        signal.raise_signal(signal.SIGKILL if self._plan.how == "kill" else signal.SIGTERM)
