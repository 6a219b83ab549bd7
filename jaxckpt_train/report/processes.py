"""The processes of a run as rows: who, when, how each ended, and what became of its time."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

from jaxckpt_train.report.report_event import ReportEvent, count, text
from jaxckpt_train.steps.attempts import Attempt
from jaxckpt_train.steps.goodput import AttemptGoodput, goodput


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a run; what its time went into adds up to `wall_s`.

    Attributes:
        number: from 1.
        where: its host and number, and its job, as far as was told.
        first_step, last_step: None: it had no state yet when it ended.
        lost_s: in updates that were lost.
        other_s: in a loop, or a program, that did no update.
    """

    number: int
    began: datetime.datetime
    ended: datetime.datetime
    how: str
    where: str
    first_step: int | None
    last_step: int | None
    useful_steps: int
    redone_steps: int
    saves: int
    failed_saves: int
    useful_s: float
    lost_s: float
    other_s: float
    blocked_s: float
    to_resume_s: float
    wall_s: float


@dataclasses.dataclass(frozen=True)
class Totals:
    """All processes together; what the time went into adds up to `wall_s`, as far as clocks were not set back.

    Attributes:
        share: of the useful time, from 0 to 1.
        between_s: without a process.
    """

    share: float
    useful_steps: int
    redone_steps: int
    saves: int
    failed_saves: int
    useful_s: float
    lost_s: float
    other_s: float
    blocked_s: float
    to_resume_s: float
    between_s: float
    wall_s: float


def processes_of(attempts: Sequence[Attempt], places: Sequence[str]) -> tuple[list[Process], Totals]:
    """The processes of a training, in order, and their totals.

    Args:
        attempts: all processes that a history names, in order.
        places: where each of them ran, as `place_of` gives it.
    """
    of_the_training = [pair for pair in zip(attempts, places, strict=True) if pair[0].is_of_the_training]
    attempts, places = [attempt for attempt, _ in of_the_training], [place for _, place in of_the_training]
    found = goodput(attempts)
    rows = zip(attempts, found.attempts, places, strict=True)
    processes = [_process(number, *row) for number, row in enumerate(rows, 1)]
    return processes, Totals(
        share=found.share,
        useful_steps=found.useful_steps,
        redone_steps=found.redone_steps,
        saves=found.saves,
        failed_saves=sum(each.failed_saves for each in processes),
        useful_s=found.useful_s,
        lost_s=sum(each.lost_s for each in processes),
        other_s=sum(each.other_s for each in processes),
        blocked_s=found.blocked_s,
        to_resume_s=found.to_resume_s,
        between_s=found.between_s,
        wall_s=found.wall_s,
    )


def _process(number: int, attempt: Attempt, rated: AttemptGoodput, place: str) -> Process:
    rest_s = max(0.0, rated.wall_s - rated.to_resume_s - rated.blocked_s - rated.useful_s)
    has_updates = rated.useful_steps + rated.redone_steps > 0
    return Process(
        number=number,
        began=rated.began.astimezone(datetime.UTC),
        ended=rated.ended.astimezone(datetime.UTC),
        how=rated.how,
        where=place,
        first_step=rated.first_step,
        last_step=rated.last_step,
        useful_steps=rated.useful_steps,
        redone_steps=rated.redone_steps,
        saves=rated.saves,
        failed_saves=attempt.failed_saves,
        useful_s=rated.useful_s,
        lost_s=rest_s if has_updates else 0.0,
        other_s=0.0 if has_updates else rest_s,
        blocked_s=rated.blocked_s,
        to_resume_s=rated.to_resume_s,
        wall_s=rated.wall_s,
    )


def place_of(start: ReportEvent) -> str:
    """Where a process ran, by the event of its start: its host and number, and its job, as far as they are known."""
    pid, restarts = count(start.pid), count(start.slurm_restart_count)
    words = [text(start.host), "" if pid is None else f"process {pid}"]
    job = text(start.slurm_job_id)
    if job:
        words.append(f"Slurm job {job}" + (f", restart {restarts}" if restarts else ""))
    return ", ".join(filter(None, words))
