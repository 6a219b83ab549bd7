"""The runs of a resume proof: one is interrupted and restarted until it ends, the other is not interrupted.

A failed proof raises one of these errors, which pytest shows as a failure of the test:

AssertionError
├── ResumeNotExactError      the interrupted run differs from the uninterrupted one
└── ResumeNotProvenError     a run crashed, hung, never saved, or never reached its interruption
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.testing.processes import (
    Between,
    How,
    Leaf,
    Line,
    Plan,
    ProcessFiles,
    Resumed,
    Stopped,
    Target,
    Update,
    is_below,
    run_child,
)


class ResumeNotExactError(AssertionError):
    """An interrupted run differs from an uninterrupted one. The message starts with the first difference.

    Attributes:
        causes: the likely causes, the most likely first.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class ResumeNotProvenError(AssertionError):
    """The runs could not be compared. The message says why."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of a run that has ended.

    Attributes:
        files: the files of the process.
        plan: the plan of the process.
        exit_code: the exit code, negative for a signal; None: the process hung and was killed.
        ignores: returns whether to leave out the metric of a name.
    """

    files: ProcessFiles
    plan: Plan
    exit_code: int | None
    ignores: Callable[[str], bool] = lambda name: False

    @functools.cached_property
    def _lines(self) -> Sequence[Line]:
        return self.files.lines()

    @functools.cached_property
    def starts(self) -> list[Resumed]:
        """The records of the calls of `resume`; there should be one."""
        return [line for line in self._lines if isinstance(line, Resumed)]

    @functools.cached_property
    def updates(self) -> list[Update]:
        """The recorded updates in order, without ignored metrics."""
        return [self._without_ignored(line) for line in self._lines if isinstance(line, Update)]

    def _without_ignored(self, update: Update) -> Update:
        metrics = {name: leaf for name, leaf in update.metrics.items() if not self.ignores(name)}
        return msgspec.structs.replace(update, metrics=metrics) if len(metrics) < len(update.metrics) else update

    @functools.cached_property
    def ignored(self) -> set[str]:
        """The names of the metrics that are left out."""
        updates = [line for line in self._lines if isinstance(line, Update)]
        return {name for update in updates for name in update.metrics if self.ignores(name)}

    @functools.cached_property
    def by_step(self) -> dict[int, Update]:
        """The updates by their label."""
        return {update.step: update for update in self.updates}

    @functools.cached_property
    def between(self) -> dict[int, Between]:
        """The records of what was observed after `ckpt(...)` of an update, by the label of the update."""
        return {line.step: line for line in self._lines if isinstance(line, Between)}

    @property
    def start(self) -> Resumed:
        """The record of the call of `resume`."""
        return self.starts[0]

    @property
    def resumed_at(self) -> int | None:
        """The step from which the run resumed; None: it started from the beginning."""
        return self.starts[0].step if self.starts else None

    @property
    def was_interrupted(self) -> bool:
        """Whether the process reached its interruption."""
        return any(isinstance(line, Stopped) for line in self._lines)

    @property
    def last(self) -> int | None:
        """The label of the last update, or None."""
        return self.updates[-1].step if self.updates else None

    def array(self, leaf: Leaf) -> np.ndarray | None:
        """Return the data of a leaf; None: it is not an array, or its data were not kept."""
        dtype = np.dtype(np.uint32) if leaf.kind.startswith("key<") else DTYPES.get(leaf.kind)
        if dtype is None:
            return None
        data = self.files.value(leaf, dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64)))
        return None if data is None else np.frombuffer(data, dtype).reshape(leaf.shape)

    def fail(self, problem: str) -> ResumeNotProvenError:
        """Return an error with the end of the log of the process."""
        return ResumeNotProvenError(f"{problem}\nIts log, {self.files.log}, ends with:\n{self.files.log_tail()}")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Starts the processes of one proof.

    Args:
        target: the target to run.
        directory: the directory of the proof.
        how: how to interrupt the processes.
        timeout_s: the time limit of each process.
        start: runs a plan, as `run_child` does.
        ignores: returns whether to leave out the metric of a name.
    """

    target: Target
    directory: Path
    how: How
    timeout_s: float
    start: Callable[[Path, Path, float], int | None] = run_child
    ignores: Callable[[str], bool] = lambda name: False

    def run(
        self,
        name: str,
        number: int,
        stop_at: int | None = None,
        values_from: int | None = None,
        saves_first: bool = False,
    ) -> Attempt:
        """Run one process.

        Args:
            name: the name of the run; all processes of a run save in one directory.
            number: the number of the process in the run, from 1.
            stop_at, values_from, saves_first: see `Plan`.

        Raises:
            ResumeNotProvenError: the process hung, or its records cannot be compared.
        """
        folder = self.directory / name
        files = ProcessFiles(folder / f"process-{number}")
        plan = Plan(
            self.target,
            str(folder / "run"),
            stop_at,
            self.how,
            values_from,
            self.timeout_s,
            time.monotonic() + self.timeout_s,
            saves_first,
        )
        code = self.start(files.write_plan(plan), files.log, self.timeout_s)
        attempt = Attempt(files, plan, code, self.ignores)
        _check_comparable(attempt, f"the {name} run, process {number}")
        return attempt


def _check_comparable(attempt: Attempt, subject: str) -> None:
    if attempt.exit_code is None:
        last = "no update" if attempt.last is None else f"update {attempt.last}"
        raise attempt.fail(
            f"{subject} did not end in {attempt.plan.timeout_s:g} s (timeout_s). It reported {last} last. The log "
            "shows the stacks of its threads."
        )
    if attempt.updates and not attempt.starts:
        raise attempt.fail(
            f"{subject} reported updates but never called ckpt.resume, so it would start from the beginning each time: "
            "call ckpt.resume(state, data) before the loop"
        )
    if len(attempt.starts) > 1:
        raise attempt.fail(
            f"{subject} called ckpt.resume {len(attempt.starts)} times, expected 1: a proof follows one loop with one "
            "CheckpointCallback. Let make_run run only one loop."
        )
    for start in attempt.starts:
        if not is_below(start.directory, attempt.plan.directory):
            raise attempt.fail(
                f"{subject} saves to {start.directory}: expected a path inside the directory that was passed to "
                f"make_run, {attempt.plan.directory}, so that each run has its own"
            )
    if not attempt.updates and attempt.exit_code == 0 and attempt.resumed_at is not None:
        raise attempt.fail(
            f"{subject} resumed at {attempt.resumed_at} and had no update left, so nothing is proven: interrupt the "
            "run earlier (kill_at), or let it do more updates"
        )
    if not attempt.updates and attempt.exit_code == 0:
        raise attempt.fail(
            f"{subject} ended without reporting an update to a CheckpointCallback: call ckpt.resume(...) and "
            "ckpt(...), check that the callback is enabled and that there was an update to do"
        )


def run_interrupted(
    runner: Runner, kill_at: Sequence[int], name: str = "interrupted", saves_first: bool = False
) -> list[Attempt]:
    """Run the target with interruptions until it ends.

    Args:
        runner: starts the processes.
        kill_at: the updates in which to interrupt the run.
        name: the name of the run.
        saves_first: whether to save these updates before each interruption, so that the run resumes at them.

    Raises:
        ResumeNotProvenError: the run did not reach an interruption, did not resume, or failed by itself.
    """
    attempts: list[Attempt] = []
    for number, stop_at in enumerate([*kill_at, None], 1):
        attempt = runner.run(name, number, stop_at, saves_first=saves_first)
        if attempts:
            _check_resumed(attempt, attempts[-1])
        _check_end(attempt, f"the {name} run, process {number}{_resumed(attempt)}")
        attempts.append(attempt)
    return attempts


def run_uninterrupted(runner: Runner, name: str, values_from: int) -> Attempt:
    """Run the target without an interruption.

    Raises:
        ResumeNotProvenError: the run failed.
    """
    attempt = runner.run(name, 1, None, values_from)
    _check_end(attempt, f"the {name} run")
    return attempt


def _resumed(attempt: Attempt) -> str:
    return "" if attempt.resumed_at is None else f" (resumed at {attempt.resumed_at})"


def _check_end(attempt: Attempt, subject: str) -> None:
    stop_at, how, code, last = attempt.plan.stop_at, attempt.plan.how, attempt.exit_code, attempt.last
    after = "before its first update" if last is None else f"after update {last}"
    if stop_at is None or not attempt.was_interrupted:
        if code != 0:
            raise attempt.fail(f"{subject} ended by itself with exit code {code} {after}")
        if stop_at is None:
            return
        raise attempt.fail(
            f"{subject} ended {after} and never reached update {stop_at} (kill_at): let it do more updates, or choose "
            "an earlier update"
        )
    if how == "preempt" and code == -15:
        raise attempt.fail(
            f"{subject} was ended by SIGTERM in update {stop_at} instead of saving and exiting, because its "
            'CheckpointCallback does not handle this signal: add it to signals=, or use how="kill"'
        )
    if last != stop_at:
        what = "SIGTERM" if how == "preempt" else "the error that ckpt(...) raised"
        raise attempt.fail(
            f"{subject} continued after {what} in update {stop_at}, to update {last}: the loop ignores the request to "
            "exit or catches the error"
        )


def _check_resumed(attempt: Attempt, before: Attempt) -> None:
    if attempt.starts and attempt.start.directory != before.start.directory:
        raise attempt.fail(
            f"the run saves to another directory each time, {before.start.directory} and {attempt.start.directory}, "
            "so it cannot resume: use a fixed path inside the directory that is passed to make_run"
        )
    if attempt.starts and attempt.resumed_at is None:
        raise attempt.fail(
            f"no step was saved before the interruption in update {before.plan.stop_at}, so the run started from the "
            "beginning and nothing is proven: save earlier (save_interval_steps), or interrupt later (kill_at)"
        )
