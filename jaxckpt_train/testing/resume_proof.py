"""The proof that a training loop resumes exactly: it gives the same bytes with and without an interruption.

`assert_resume_exact` runs the loop and compares the runs. `report` writes the message of a failure: the first
difference, likely causes, and what each process did.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jaxckpt_train._validation import one_of, refuse, seconds, whole
from jaxckpt_train.testing.causes import Cause, Evidence, likely_causes
from jaxckpt_train.testing.differences import Difference, differing_names, first_differences, numbers_of
from jaxckpt_train.testing.processes import (
    Attempt,
    Batch,
    How,
    Leaf,
    MakeRun,
    Plan,
    Target,
    new_directory,
    remove,
    run_child,
    target_of,
)

TIMEOUT_S = 300.0


class ResumeNotExactError(AssertionError):
    """An interrupted run differs from an uninterrupted one. The message starts with the first difference.

    Attributes:
        causes: the likely causes, the most likely first.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class ResumeNotProvenError(AssertionError):
    """The runs could not be compared: one crashed, hung, never saved, or never reached its interruption."""


@dataclasses.dataclass(frozen=True)
class ResumeProof:
    """The result of a successful proof: everything that was compared is equal.

    Attributes:
        updates: the number of updates of the run.
        interrupted_in: the updates in which the run was interrupted: `kill_at`, then the one before an evaluation.
        resumed_at: the steps from which the run resumed.
        compared_updates: the number of updates compared after a resume; an update that was done twice counts twice.
        compared_batches: the number of batches in these updates; 0: none was recorded, see
            docs/how-to/resume-proof.md.
        ignored_metrics: the metrics that `ignore_metrics` left out.
    """

    updates: int
    interrupted_in: tuple[int, ...]
    resumed_at: tuple[int, ...]
    compared_updates: int
    compared_batches: int
    ignored_metrics: tuple[str, ...] = ()


def assert_resume_exact(
    make_run: MakeRun,
    *,
    kill_at: int | Sequence[int],
    how: How = "kill",
    timeout_s: float = TIMEOUT_S,
    ignore_metrics: str | Sequence[str] = (),
    directory: str | os.PathLike[str] | None = None,
) -> ResumeProof:
    """Run a training loop with and without an interruption, in new processes, and compare every update.

    The proof compares the batches that the loop takes, the metrics that it passes to `ckpt(...)`, and every saved leaf.
    The loop needs nothing but a `CheckpointCallback`. Multi-process jobs are not supported.

    Args:
        make_run: a function at the top level of a module, called with the directory (a pathlib.Path) to save in; pass
            further arguments, which must be plain data, with `functools.partial(function, name=value)`. Or a Python
            script and its arguments, as after `python`, with "{directory}" in one of them.
        kill_at: the update, or several in ascending order, in which to interrupt the run before that update is saved.
        how: "kill": send SIGKILL once the pending save is committed. "preempt": send SIGTERM, so that the run saves and
            exits. "raise": raise an error from `ckpt(...)`.
        timeout_s: the time limit of each process in seconds.
        ignore_metrics: metrics to leave out, such as those that depend on the clock: a name, a pattern such as
            "*_per_s", or several. Nested metrics match "timing/**".
        directory: a new or empty directory for the files of the runs; None: a temporary one. It is removed if the proof
            succeeds.

    Raises:
        ResumeNotExactError: the runs differ; the message has the first difference and likely causes.
        ResumeNotProvenError: the runs could not be compared.
        SettingsError: an argument is wrong.
    """
    __tracebackhide__ = True
    stops = _stops(kill_at)
    one_of("kill", "preempt", "raise")("resume proof: how", how)
    limit_s = seconds("resume proof: timeout_s", timeout_s)
    ignored: Any = [ignore_metrics] if isinstance(ignore_metrics, str) else ignore_metrics
    if not isinstance(ignored, Collection) or not all(isinstance(each, str) and each for each in ignored):
        expected = 'a name or pattern of metrics, such as "*_per_s", or several'
        refuse("resume proof: ignore_metrics", expected, ignore_metrics)
    runner = Runner(target_of(make_run), new_directory(directory), how, limit_s, tuple(ignored))
    try:
        return prove(runner, stops)
    except AssertionError as failure:
        raise failure.with_traceback(None) from None  # a test's report ends at the line of the test


def _stops(kill_at: int | Sequence[int]) -> list[int]:
    given: Any = list(kill_at) if isinstance(kill_at, Sequence) else [kill_at]
    stops = [whole(1)("resume proof: kill_at", stop) for stop in given]
    if not stops or stops != sorted(set(stops)):
        refuse("resume proof: kill_at", "an update, or several in ascending order", kill_at)
    return stops


@dataclasses.dataclass(frozen=True)
class Runner:
    """Starts the processes of one proof."""

    target: Target  # the target to run
    directory: Path  # the directory of the proof
    how: How  # how to interrupt the processes
    timeout_s: float  # the time limit of each process
    ignored: tuple[str, ...] = ()  # patterns of metrics to leave out
    start: Callable[[Path, float], int | None] = run_child  # runs the plan in a folder, as `run_child` does

    def run(self, name: str, kill_at: Sequence[int] = (), saves_first: bool = False) -> list[Attempt]:
        """Run the target until it ends by itself; all processes save in one directory.

        Args:
            name: the name of the run.
            kill_at: the updates in which to interrupt the run.
            saves_first: see `Plan`.
        """
        attempts: list[Attempt] = []
        for number, stop_at in enumerate([*kill_at, None], 1):
            folder, directory = self.directory / name / f"process-{number}", self.directory / name / "run"
            plan = Plan(self.target, str(directory), stop_at, self.how, self.ignored, saves_first)
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
            return f"called ckpt.resume {len(starts)} times, expected 1: run one loop with one CheckpointCallback"
        if starts and not Path(starts[0].directory).resolve().is_relative_to(Path(attempt.plan.directory).resolve()):
            return f"saves to {starts[0].directory}: expected a path inside {attempt.plan.directory}"
        if not attempt.updates and code == 0:
            return (
                "ended without reporting an update: let it do more updates, interrupt it earlier (kill_at), or check "
                "that it calls ckpt(...) of a CheckpointCallback that is enabled"
            )
        if before is not None and starts and attempt.resumed_at is None:
            return (
                f"started from the beginning in {starts[0].directory}: no step was saved in "
                f"{before.starts[0].directory} before the interruption in update {before.plan.stop_at}"
            )
        return _ending_problem(attempt, after)


def _ending_problem(attempt: Attempt, after: str) -> str | None:
    stop_at, code, last = attempt.plan.stop_at, attempt.exit_code, attempt.last
    if stop_at is None or not attempt.was_interrupted:
        if code != 0:
            return f"ended by itself with exit code {code} {after}"
        if stop_at is None:
            return None
        return f"ended {after} and never reached update {stop_at} (kill_at)"
    if attempt.plan.how == "preempt" and code == -15:
        return f"was ended by SIGTERM in update {stop_at}: add it to the signals= of its CheckpointCallback"
    if last != stop_at:
        what = "SIGTERM" if attempt.plan.how == "preempt" else "the error that ckpt(...) raised"
        return f"continued after {what} in update {stop_at}, to update {last}"
    return None


def prove(runner: Runner, stops: Sequence[int]) -> ResumeProof:
    """Run the target with and without interruptions in these updates, and compare; see `assert_resume_exact`."""
    attempts = runner.run("interrupted", stops)
    [straight] = runner.run("uninterrupted")
    _compare(runner, attempts, straight)
    # The first update after which the loop seems to evaluate, unless the run has resumed at such an update.
    found = [each for each in straight.between.values() if each.step != straight.last]
    steps = [each.step for each in found if each.changed] or [each.step for each in found]
    if steps and not any(attempt.resumed_at in steps for attempt in attempts):
        more = runner.run("interrupted-before-an-evaluation", steps[:1], saves_first=True)
        _compare(runner, more, straight)
        attempts += more
    remove(runner.directory)
    starts = [attempt.resumed_at for attempt in attempts if attempt.resumed_at is not None]
    resumed = [update for attempt in attempts if attempt.resumed_at is not None for update in attempt.updates]
    return ResumeProof(
        straight.last or 0,
        tuple(attempt.plan.stop_at for attempt in attempts if attempt.plan.stop_at is not None),
        tuple(starts),
        len(resumed),
        sum(not batch.opaque_leaf() for update in resumed if not update.elsewhere for batch in update.batches),
        tuple(sorted({name for update in straight.updates for name in update.ignored})),
    )


def _compare(runner: Runner, attempts: list[Attempt], straight: Attempt) -> None:
    kinds = first_differences(attempts, straight)
    if not kinds:
        return
    # Repeat the uninterrupted run, to find out whether the loop is repeatable at all.
    [again] = runner.run("uninterrupted-again")
    twin = first_differences([again], straight)
    first = next(iter(kinds.values()))
    if not twin and first.number == 0:  # before any interruption: the loop is not repeatable, even if rarely
        twin, again = {first.kind: first}, attempts[0]
    evidence = Evidence(attempts, straight, kinds, twin, again)
    causes = likely_causes(evidence)
    raise ResumeNotExactError(report(evidence, causes), tuple(cause.what for cause in causes))


def report(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Return the message of a failure, which starts with the first difference."""
    lines = [describe(evidence, evidence.first)]
    for kind, found in evidence.kinds.items():
        if found is not evidence.first and kind in ("leaf", "batch", "metric"):
            lines.append(("first leaf that differs: " if kind == "leaf" else "") + describe(evidence, found))
    if "batch" not in evidence.kinds:
        lines.append(_of_equal_batches(evidence))
    lines += ["likely causes, the most likely first:"]
    for number, cause in enumerate(causes, 1):
        lines += _wrapped(f"  {number}. ", cause.what)
        lines += _wrapped("     seen: ", cause.seen) if cause.seen else []
        lines += _wrapped("     do: ", cause.do)
    lines += [_of_repetition(evidence), "what the processes did:"]
    for attempt in evidence.attempts:
        start = "started from the beginning" if attempt.resumed_at is None else f"resumed at {attempt.resumed_at}"
        ends = {"kill": "was killed (SIGKILL)", "preempt": "was preempted (SIGTERM)", "raise": "raised an error"}
        stopped = f"{ends[attempt.plan.how]} in update {attempt.plan.stop_at}"
        end = stopped if attempt.was_interrupted else f"ended after update {attempt.last}"
        lines.append(f"  {attempt.folder.name.replace('-', ' ')}: {start}, {end}")
    lines.append(f"logs and records: {evidence.straight.folder.parent.parent}")
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(head + text, 116, subsequent_indent=" " * len(head), break_long_words=False)


def describe(evidence: Evidence, found: Difference) -> str:
    """Return a difference as one line."""
    attempt = evidence.attempts[found.number]
    since = "interrupted later" if attempt.resumed_at is None else f"resumed at {attempt.resumed_at}"
    match found.kind:
        case "start":
            return f"at the start: {_of_leaf(found, 'second start')}"
        case "restored":
            return f"the state restored from step {found.step} differs from the state after update {found.step}: " + (
                _of_leaf(found, since)
            )
        case "label":
            return f"after the resume at {attempt.resumed_at}: expected update {found.straight}, found {found.resumed}"
        case "end":
            return f"the run ended after update {found.straight} (uninterrupted) vs {found.resumed} ({since})"
        case "batch":
            return f"update {found.step}: {_of_batch(found, since)}"
        case _:
            return f"update {found.step}: {_of_leaf(found, since)}"


def _of_batch(found: Difference, since: str) -> str:
    which = f" (number {found.name} of {found.of})" if found.of > 1 else ""
    if not isinstance(found.straight, Batch) or not isinstance(found.resumed, Batch):
        return f"number of batches: {found.straight} (uninterrupted) vs {found.resumed} ({since})"
    names = sorted(differing_names(found.straight.leaves, found.resumed.leaves))
    arrays = f"{', '.join(names[:3])}, {len(names)} of {len(found.straight.leaves)} arrays"
    return f"its batch differs{which}: in {arrays} ({since})"


def _of_leaf(found: Difference, since: str) -> str:
    is_metric, straight, resumed = found.kind == "metric", found.straight, found.resumed
    count = f"; {found.differing} of {found.of} leaves differ there" if found.of > 1 and not is_metric else ""
    if not isinstance(straight, Leaf) or not isinstance(resumed, Leaf):
        only = "uninterrupted" if isinstance(straight, Leaf) else since
        return f"{found.name} is in the {'metrics' if is_metric else 'state'} of the {only} run only{count}"
    if straight.form() != resumed.form():
        return f"{found.name} differs: {straight.form()} (uninterrupted) vs {resumed.form()} ({since}){count}"
    form = "" if is_metric or straight.kind.startswith("python") else f" {straight.form()}"
    values = [numbers_of(straight), numbers_of(resumed)]
    texts = [str(numbers.tolist()) for numbers in values if numbers is not None]
    shown = f": {texts[0]} (uninterrupted) vs {texts[1]}" if len(texts) == 2 else ""
    return f"{found.name}{form} differs{shown}{f' ({since})' if is_metric else count}"


def _of_equal_batches(evidence: Evidence) -> str:
    if evidence.takes_elsewhere:
        return "batches were not compared, because they were taken on other threads than the loop's"
    if evidence.opaque_leaf is not None:
        return f"batches could not be compared: they contain {evidence.opaque_leaf}, of which only the type is known"
    if evidence.sees_batches:
        return "all batches are equal"
    return "no batches were recorded: the loop takes none from the iterator that ckpt.resume(state, data) returned"


def _of_repetition(evidence: Evidence) -> str:
    if not evidence.twin:
        return "the uninterrupted run was repeated and gave the same result, so the interruption causes the difference"
    if evidence.again is evidence.attempts[0]:
        return "the interrupted run differs before its interruption: the loop is NOT repeatable"
    first = next(iter(evidence.twin.values()))
    where = "its start" if first.kind == "start" else f"update {first.step}"
    return f"the uninterrupted run was repeated and gave another result, first in {where}: the loop is NOT repeatable"
