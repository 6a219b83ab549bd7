"""The runs of a proof: one that is interrupted and started again until it ends, and one that is left alone.

What a proof of an exact resume fails with; pytest shows both as failures of the test.

AssertionError
├── ResumeNotExactError      the interrupted run differs from the uninterrupted one
└── ResumeNotProvenError     a run crashed, hung, never saved, or never got to its interruption
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
    """An interrupted run differs from an uninterrupted one; the message begins with the first difference.

    Attributes:
        causes: likely causes, the likeliest first.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class ResumeNotProvenError(AssertionError):
    """The runs did not get so far that they could be compared; the message says why."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of a run, as it has ended.

    Attributes:
        files: of it.
        plan: what it was to do.
        exit_code: below 0 for a signal; None: it hung, and was ended.
        ignores: by its name, whether a metric is left out.
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
        """Each call of `resume`; there should be one."""
        return [line for line in self._lines if isinstance(line, Resumed)]

    @functools.cached_property
    def updates(self) -> list[Update]:
        """The updates that it told of, in their order."""
        return [self._without_ignored(line) for line in self._lines if isinstance(line, Update)]

    def _without_ignored(self, update: Update) -> Update:
        metrics = {name: leaf for name, leaf in update.metrics.items() if not self.ignores(name)}
        return msgspec.structs.replace(update, metrics=metrics) if len(metrics) < len(update.metrics) else update

    @functools.cached_property
    def ignored(self) -> set[str]:
        """The metrics that are left out."""
        updates = [line for line in self._lines if isinstance(line, Update)]
        return {name for update in updates for name in update.metrics if self.ignores(name)}

    @functools.cached_property
    def by_step(self) -> dict[int, Update]:
        """The updates by their label."""
        return {update.step: update for update in self.updates}

    @functools.cached_property
    def between(self) -> dict[int, Between]:
        """What was seen after `ckpt(...)` of an update and before the next one, by the label of the former."""
        return {line.step: line for line in self._lines if isinstance(line, Between)}

    @property
    def start(self) -> Resumed:
        """What it went on from."""
        return self.starts[0]

    @property
    def resumed_at(self) -> int | None:
        """The step that it went on from; None: it began anew."""
        return self.starts[0].step if self.starts else None

    @property
    def was_interrupted(self) -> bool:
        """Whether it got to its interruption."""
        return any(isinstance(line, Stopped) for line in self._lines)

    @property
    def last(self) -> int | None:
        """The label of its last update."""
        return self.updates[-1].step if self.updates else None

    def array(self, leaf: Leaf) -> np.ndarray | None:
        """The data of a leaf; None: it is no array, or was not kept."""
        dtype = np.dtype(np.uint32) if leaf.kind.startswith("key<") else DTYPES.get(leaf.kind)
        if dtype is None:
            return None
        data = self.files.value(leaf, dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64)))
        return None if data is None else np.frombuffer(data, dtype).reshape(leaf.shape)

    def fail(self, problem: str) -> ResumeNotProvenError:
        """The error that says so, with what the process printed last."""
        return ResumeNotProvenError(f"{problem}\nits log, {self.files.log}, ends with\n{self.files.log_tail()}")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Starts the processes of one proof.

    Args:
        target: what they run.
        directory: of the proof.
        how: they are interrupted.
        timeout_s: of each process.
        start: runs a plan, as `run_child` does.
        ignores: by its name, whether a metric is left out of all that is compared.
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
            name: of the run, whose processes save in one directory.
            number: of the process in it, from 1.
            stop_at, values_from, saves_first: see Plan.

        Raises:
            ResumeNotProvenError: it hung, or nothing of it can be compared.
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
        _check_that_it_can_be_compared(attempt, f"the {name} run, process {number}")
        return attempt


def _check_that_it_can_be_compared(attempt: Attempt, subject: str) -> None:
    if attempt.exit_code is None:
        last = "no update" if attempt.last is None else f"update {attempt.last}"
        raise attempt.fail(
            f"{subject} did not end in {attempt.plan.timeout_s:g} s (timeout_s); {last} was the last one it told of; "
            "the log shows where its threads were"
        )
    if attempt.updates and not attempt.starts:
        raise attempt.fail(
            f"{subject} told of updates and never called ckpt.resume, so it begins anew each time: call "
            "ckpt.resume(state, data) before the loop"
        )
    if len(attempt.starts) > 1:
        raise attempt.fail(
            f"{subject} called ckpt.resume {len(attempt.starts)} times: a proof follows one loop with one "
            "CheckpointCallback; let make_run run that one only"
        )
    for start in attempt.starts:
        if not is_below(start.directory, attempt.plan.directory):
            raise attempt.fail(
                f"{subject} saves to {start.directory}: expected a place in the directory that it was given, "
                f"{attempt.plan.directory}; each run must have its own"
            )
    if not attempt.updates and attempt.exit_code == 0 and attempt.resumed_at is not None:
        raise attempt.fail(
            f"{subject} resumed at {attempt.resumed_at} and had no update to do, so nothing is proven: interrupt it "
            "earlier (kill_at), or let it do more updates"
        )
    if not attempt.updates and attempt.exit_code == 0:
        raise attempt.fail(
            f"{subject} ended and told no update to a CheckpointCallback: call ckpt.resume(...) and ckpt(...); is it "
            "enabled, and was there an update to do?"
        )


def run_interrupted(
    runner: Runner, kill_at: Sequence[int], name: str = "interrupted", saves_first: bool = False
) -> list[Attempt]:
    """Run it with its interruptions until it ends.

    Args:
        runner: starts its processes.
        kill_at: the updates in which it is interrupted.
        name: of the run.
        saves_first: whether these updates are saved before, so that the run resumes at each.

    Raises:
        ResumeNotProvenError: it did not get to one of them, did not resume, or ended by itself with an error.
    """
    attempts: list[Attempt] = []
    for number, stop_at in enumerate([*kill_at, None], 1):
        attempt = runner.run(name, number, stop_at, saves_first=saves_first)
        if attempts:
            _check_that_it_resumed(attempt, attempts[-1])
        _check_end(attempt, f"the {name} run, process {number}{_resumed(attempt)}")
        attempts.append(attempt)
    return attempts


def run_uninterrupted(runner: Runner, name: str, values_from: int) -> Attempt:
    """Run it in one go.

    Raises:
        ResumeNotProvenError: it did not end well.
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
            f"{subject} ended {after} and never got to update {stop_at} (kill_at): let it do more updates, or choose "
            "an earlier one"
        )
    if how == "preempt" and code == -15:
        raise attempt.fail(
            f"{subject} was ended by SIGTERM in update {stop_at} instead of saving and leaving: its "
            'CheckpointCallback does not watch for it (signals=); use how="kill", or let it'
        )
    if last != stop_at:
        what = "SIGTERM" if how == "preempt" else "the error that ckpt(...) raised"
        raise attempt.fail(
            f"{subject} went on after {what} in update {stop_at}, to update {last}: whoever asks it to leave is not "
            "heeded, or the error was caught in the loop"
        )


def _check_that_it_resumed(attempt: Attempt, before: Attempt) -> None:
    if attempt.starts and attempt.start.directory != before.start.directory:
        raise attempt.fail(
            f"the run saves to another directory each time, {before.start.directory} and {attempt.start.directory}, "
            "so it cannot resume: derive it from the directory that make_run gets, without the time in it"
        )
    if attempt.starts and attempt.resumed_at is None:
        raise attempt.fail(
            f"no step was saved before the interruption in update {before.plan.stop_at}, so the run began anew and "
            "nothing is proven: let it save earlier (save_interval_steps), or interrupt it later (kill_at)"
        )
