"""The runs of a resume proof: one is interrupted and restarted until it ends, the other is not interrupted.

A failed proof raises one of these errors, which pytest shows as a failure of the test:

AssertionError
├── ResumeNotExactError      the interrupted run differs from the uninterrupted one
└── ResumeNotProvenError     a run crashed, hung, never saved, or never reached its interruption
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxckpt_train.testing.processes import Attempt, How, Plan, Target, is_below, run_child


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
class Runner:
    """Starts the processes of one proof."""

    target: Target  # the target to run
    directory: Path  # the directory of the proof
    how: How  # how to interrupt the processes
    timeout_s: float  # the time limit of each process
    ignored: tuple[str, ...] = ()  # patterns of metrics to leave out
    start: Callable[[Path, float], int | None] = run_child  # runs the plan in a folder, as `run_child` does

    def run(
        self, name: str, kill_at: Sequence[int] = (), values_from: int | None = None, saves_first: bool = False
    ) -> list[Attempt]:
        """Run the target until it ends by itself.

        Args:
            name: the name of the run; all its processes save in one directory.
            kill_at: the updates in which to interrupt the run.
            values_from, saves_first: see `Plan`.

        Raises:
            ResumeNotProvenError: the run did not reach an interruption, did not resume, hung, or failed by itself.
        """
        attempts: list[Attempt] = []
        for number, stop_at in enumerate([*kill_at, None], 1):
            folder, directory = self.directory / name / f"process-{number}", self.directory / name / "run"
            plan = Plan(self.target, str(directory), stop_at, self.how, self.ignored, values_from, saves_first)
            plan.write(folder)
            attempt = Attempt(folder, plan, self.start(folder, self.timeout_s))
            problem = self._problem(attempt, attempts[-1] if attempts else None)
            if problem is not None:
                resumed = "" if attempt.resumed_at is None else f" (resumed at {attempt.resumed_at})"
                log = f"Its log, {attempt.log_tail()}"
                raise ResumeNotProvenError(f"the {name} run, process {number}{resumed} {problem}\n{log}")
            attempts.append(attempt)
        return attempts

    def _problem(self, attempt: Attempt, before: Attempt | None) -> str | None:
        """Return why the records of a process cannot be compared, or None."""
        starts, code, last = attempt.starts, attempt.exit_code, attempt.last
        after = "before its first update" if last is None else f"after update {last}"
        if code is None:
            return f"did not end in {self.timeout_s:g} s (timeout_s); it hung {after}, where its log shows its threads"
        if len(starts) != 1 and (starts or attempt.updates):
            return (
                f"called ckpt.resume {len(starts)} times, expected 1: let make_run run one loop with one "
                "CheckpointCallback, and call ckpt.resume(state, data) before the loop"
            )
        if starts and not is_below(starts[0].directory, attempt.plan.directory):
            return (
                f"saves to {starts[0].directory}: expected a path inside the directory that was passed to make_run, "
                f"{attempt.plan.directory}, so that each run has its own"
            )
        if not attempt.updates and code == 0:
            return (
                "ended without reporting an update, so nothing is proven: let it do more updates, interrupt it earlier "
                "(kill_at), or check that it calls ckpt(...) of a CheckpointCallback that is enabled"
            )
        if before is not None and starts and attempt.resumed_at is None:
            return (
                f"started from the beginning in {starts[0].directory}, so nothing is proven: no step was saved in "
                f"{before.starts[0].directory} before the interruption in update {before.plan.stop_at}. Save earlier "
                "(save_interval_steps), interrupt later (kill_at), or use a fixed path inside the given directory"
            )
        return _ending_problem(attempt, after)


def _ending_problem(attempt: Attempt, after: str) -> str | None:
    stop_at, code, last = attempt.plan.stop_at, attempt.exit_code, attempt.last
    if stop_at is None or not attempt.was_interrupted:
        if code != 0:
            return f"ended by itself with exit code {code} {after}"
        if stop_at is None:
            return None
        return (
            f"ended {after} and never reached update {stop_at} (kill_at): let it do more updates, or choose an earlier "
            "update"
        )
    if attempt.plan.how == "preempt" and code == -15:
        return (
            f"was ended by SIGTERM in update {stop_at} instead of saving and exiting, because its CheckpointCallback "
            'does not handle this signal: add it to signals=, or use how="kill"'
        )
    if last != stop_at:
        what = "SIGTERM" if attempt.plan.how == "preempt" else "the error that ckpt(...) raised"
        return (
            f"continued after {what} in update {stop_at}, to update {last}: the loop ignores the request to exit or "
            "catches the error"
        )
    return None
