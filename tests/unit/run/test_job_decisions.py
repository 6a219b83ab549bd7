"""Decisions of a multi-process job: at which steps the processes ask the primary, and what they decide on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.manager import SaveScheduler
from jaxckpt_train.pending import SaveSlot
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, decide
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.job import decided_locally
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import START, Clock

IMPROVES, EVERY_SECOND = jct.ImprovementPolicy("loss", "min"), jct.EverySecondsPolicy(1)
EVERY_TEN = jct.FixedIntervalPolicy(10)


class OfUser:
    """A policy of a user, without a repr."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return False


class Job:
    """A job as its primary sees it: records the steps about which the processes ask it."""

    is_single_process, processes = False, 2

    def __init__(self, directory: Path, policy: Any) -> None:
        self.asked: list[int] = []
        run = RunDirectory(LocalBackend(), str(directory), None, Clock())
        job_sync: Any = self
        self.decide = SaveScheduler(policy, run, SaveSlot("wait", 1.0, "skip"), job_sync, Clock()).decide

    @property
    def job(self) -> Job:
        return self

    def broadcast(self, doing: str, say: Callable[[], bytes]) -> bytes:
        self.asked.append(int(doing.rpartition(" ")[2]))
        return say()


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (EVERY_TEN, []),
        (jct.TemporarySavePolicy(jct.AnySavePolicy([EVERY_TEN, jct.SpecificStepsPolicy([3])])), []),
        (jct.AllSavePolicy([EVERY_TEN, jct.FixedIntervalPolicy(4)]), []),
        (IMPROVES, range(1, 31)),
        (OfUser(), range(1, 31)),
        (jct.AnySavePolicy([EVERY_TEN, OfUser()]), range(1, 31)),
        (jct.AllSavePolicy([IMPROVES, EVERY_TEN]), [10, 20, 30]),
        (jct.AllSavePolicy([EVERY_SECOND, EVERY_TEN]), [10, 20, 30]),
        (jct.AnySavePolicy([jct.InitialSavePolicy(), EVERY_TEN]), [1, 10, 20, 30]),
    ],
    ids=lambda value: decided_locally(value) if hasattr(value, "should_save") else "",
)
def test_primary_is_asked_only_where_needed(tmp_path: Path, policy: Any, asked: Iterable[int]) -> None:
    job = Job(tmp_path, policy)
    for step in range(1, 31):
        job.decide(step)
    assert job.asked == list(asked)


@pytest.mark.parametrize(
    "policy",
    [
        jct.OverheadBudgetPolicy(),
        jct.YoungDalyPolicy(),
        EVERY_SECOND,
        jct.AllSavePolicy([EVERY_SECOND, jct.OverheadBudgetPolicy()]),
    ],
)
def test_policies_by_time_are_asked_now_and_then(tmp_path: Path, policy: Any) -> None:
    job, mixed = Job(tmp_path, jct.TemporarySavePolicy(policy)), Job(tmp_path, jct.AnySavePolicy([policy, EVERY_TEN]))
    for step in range(1, 301):
        job.decide(step)
        mixed.decide(step)
    assert job.asked[0] == mixed.asked[0] == 1
    assert len(job.asked) < 60
    assert {*range(10, 301, 10)} <= {*mixed.asked}
    assert len(mixed.asked) < 90


def test_repeated_question_needs_no_agreement(tmp_path: Path) -> None:
    job = Job(tmp_path, jct.InitialSavePolicy())
    assert job.decide(1).save
    assert job.decide(1).save
    assert not job.decide(2).save
    assert job.asked == [1]


def test_each_process_finds_the_reason_of_the_primary(tmp_path: Path) -> None:
    policy = jct.AnySavePolicy([jct.TemporarySavePolicy(jct.FixedIntervalPolicy(5)), EVERY_TEN])
    job = Job(tmp_path, policy)
    for step in range(1, 21):
        assert job.decide(step) == decide(policy, CheckpointInfo(step, START), (), DecisionContext(START))
    assert job.asked == []
    assert (job.decide(5).temporary, job.decide(10).temporary) == (True, False)


def test_equal_policies_have_equal_texts() -> None:
    both: list[Any] = [OfUser(), EVERY_TEN]
    text = decided_locally(jct.AnySavePolicy(both))
    assert text == "AnySavePolicy(OfUser, FixedIntervalPolicy(interval=10))"
    assert decided_locally(jct.AnySavePolicy([OfUser(), EVERY_TEN])) == text
    assert decided_locally(jct.AllSavePolicy(both)) != text
    assert decided_locally(jct.EverySecondsPolicy(2)) == decided_locally(EVERY_SECOND)
    assert decided_locally(None) == "no save policy"
