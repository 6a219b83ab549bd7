"""The proof that a training loop resumes exactly: with and without an interruption it does the same, byte for byte."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.testing.attempts import Attempt, Runner, run_interrupted, run_uninterrupted
from jaxckpt_train.testing.causes import likely_causes
from jaxckpt_train.testing.differences import Difference, Kind, differences, firsts
from jaxckpt_train.testing.evidence import Evidence
from jaxckpt_train.testing.failures import ResumeNotExactError
from jaxckpt_train.testing.record_files import How, new_directory, remove
from jaxckpt_train.testing.report import report
from jaxckpt_train.testing.run_target import MakeRun, target_of
from jaxckpt_train.tree.patterns import leaf_filter
from jaxckpt_train.value_checks import one_of, refuse, seconds, whole

TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class ResumeProof:
    """What a proof has compared, all of it equal.

    Attributes:
        updates: how many updates the run has.
        interrupted_in: the updates in which it was interrupted: those of `kill_at`, then the one before an evaluation.
        resumed_at: the steps that it went on from.
        compared_updates: how many updates after a resume were compared; those done twice count twice.
        compared_batches: how many batches in them; 0: none were seen, see docs/how-to/resume-proof.md.
        ignored_metrics: the metrics that were not compared, as `ignore_metrics` says.
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
    """Run a training loop with and without an interruption, in processes of their own, and compare every update.

    Compared are the batches that the loop takes, the metrics that it gives to `ckpt(...)`, and every leaf of what it
    saves. The loop needs nothing but a `CheckpointCallback`. Jobs of several processes are not proven.

    Args:
        make_run: a function at the top of a module, called with the directory (a pathlib.Path) to save in; further
            arguments, plain data, by `functools.partial(function, name=value)`. Or a Python script and its arguments,
            as after `python`, with "{directory}" in one of them.
        kill_at: the update, or several in rising order, in which the run is interrupted: before that update is saved.
        how: "kill": by SIGKILL, once the save under way is committed. "preempt": by SIGTERM, so that it saves and
            leaves. "raise": by an error out of `ckpt(...)`.
        timeout_s: seconds for each process, after which it counts as hung.
        ignore_metrics: metrics that are not compared, as what is taken from the clock: a name, a pattern such as
            "*_per_s", or several. Of metrics within metrics "timing/**".
        directory: a new or empty one for all that the runs leave; None: a temporary one. It is removed if all is equal.

    Returns:
        What was compared.

    Raises:
        ResumeNotExactError: the runs differ; the first difference, and likely causes.
        ResumeNotProvenError: they could not be compared.
        SettingsError: an argument is wrong.
    """
    __tracebackhide__ = True
    stops = _stops(kill_at)
    one_of("kill", "preempt", "raise")("resume proof: how", how)
    limit_s = seconds("resume proof: timeout_s", timeout_s)
    ignores, target = _ignored(ignore_metrics), target_of(make_run)
    place = new_directory(None if directory is None else Path(directory))
    runner = Runner(target, place, how, limit_s, ignores=ignores)
    try:
        return prove(runner, stops)
    except AssertionError as failure:
        raise failure.with_traceback(None) from None  # a test's report ends at the line of the test


def prove(runner: Runner, stops: Sequence[int]) -> ResumeProof:
    """Run it with and without interruptions in these updates, and compare; see `assert_resume_exact`."""
    attempts = run_interrupted(runner, stops)
    straight = run_uninterrupted(runner, "uninterrupted", attempts[1].resumed_at or 0)
    _compare(runner, attempts, straight)
    if (step := _before_an_evaluation(attempts, straight)) is not None:
        more = run_interrupted(runner, [step], "interrupted-before-an-evaluation", saves_first=True)
        _compare(runner, more, straight)
        attempts += more
    remove(runner.directory)
    return _proof(attempts, straight)


def _compare(runner: Runner, attempts: list[Attempt], straight: Attempt) -> None:
    kinds = firsts(differences(attempts, straight))
    if kinds:
        evidence = _evidence(runner, attempts, straight, kinds)
        causes = likely_causes(evidence)
        raise ResumeNotExactError(report(evidence, causes), tuple(cause.what for cause in causes))


def _before_an_evaluation(attempts: list[Attempt], straight: Attempt) -> int | None:
    """The update after which the loop changes or polls something first, unless the run has resumed at such a one."""
    found = [each for each in straight.between.values() if each.step != straight.last]
    changing = [each.step for each in found if each.changed]
    steps = changing or [each.step for each in found]
    is_tried = any(attempt.resumed_at in steps for attempt in attempts)
    return steps[0] if steps and not is_tried else None


def _stops(kill_at: int | Sequence[int]) -> list[int]:
    given: Any = list(kill_at) if isinstance(kill_at, Sequence) else [kill_at]
    stops = [whole(1)("resume proof: kill_at", stop) for stop in given]
    if not stops or stops != sorted(set(stops)):
        raise SettingsError(f"resume proof: kill_at: expected an update, or several in rising order, found {kill_at!r}")
    return stops


def _ignored(patterns: str | Sequence[str]) -> Callable[[str], bool]:
    given: Any = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Collection) or not all(isinstance(each, str) and each for each in given):
        refuse("resume proof: ignore_metrics", 'a name or pattern of metrics, such as "*_per_s", or several', patterns)
    return leaf_filter(list(given))


def _evidence(runner: Runner, attempts: list[Attempt], straight: Attempt, kinds: dict[Kind, Difference]) -> Evidence:
    """Once there is a difference: whether the run is the same each time at all."""
    again = run_uninterrupted(runner, "uninterrupted-again", attempts[1].resumed_at or 0)
    twin = firsts(differences([again], straight))
    first = next(iter(kinds.values()))
    if not twin and first.number == 0:  # before any interruption: as rarely as it may happen, it happened here
        return Evidence(attempts, straight, kinds, {first.kind: first}, attempts[0])
    return Evidence(attempts, straight, kinds, twin, again)


def _proof(attempts: list[Attempt], straight: Attempt) -> ResumeProof:
    starts = [attempt.resumed_at for attempt in attempts if attempt.resumed_at is not None]
    resumed = [update for attempt in attempts if attempt.resumed_at is not None for update in attempt.updates]
    return ResumeProof(
        straight.last or 0,
        tuple(attempt.plan.stop_at for attempt in attempts if attempt.plan.stop_at is not None),
        tuple(starts),
        len(resumed),
        sum(not batch.unseen() for update in resumed if not update.elsewhere for batch in update.batches),
        tuple(sorted(straight.ignored)),
    )
