"""Decisions of a multi-process job: at which steps the processes ask the primary, and what they decide on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.policies.context import CheckpointInfo, Decision, DecisionContext, decide
from jaxckpt_train.run.job import JobDecisions, decided_locally
from tests.support.runs import START

CONTEXT = DecisionContext(START)
IMPROVES, EVERY_SECOND = jct.ImprovementPolicy("loss", "min"), jct.EverySecondsPolicy(1)
EVERY_TEN = jct.FixedIntervalPolicy(10)


class OfUser:
    """A policy of a user, without a repr."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return False


class Job:
    """A job as its primary sees it: counts what it is asked."""

    processes = 2

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.asked: list[int] = []
        self.decisions = JobDecisions(self, policy)  # type: ignore[arg-type]

    @property
    def job(self) -> Job:
        return self

    def broadcast(self, doing: str, say: Callable[[], bytes]) -> bytes:
        return say()

    def decide(self, step: int) -> Decision:
        info = CheckpointInfo(step, START)

        def ask() -> tuple[Decision, bool]:
            self.asked.append(step)
            return decide(self._policy, info, (), CONTEXT), True

        return self.decisions.decide(info, CONTEXT, ask, lambda: False, lambda: None)

    def decide_all(self, steps: Iterable[int]) -> list[int]:
        return [step for step in steps if self.decide(step).save]


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
def test_primary_is_asked_only_where_needed(policy: Any, asked: Iterable[int]) -> None:
    job = Job(policy)
    job.decide_all(range(1, 31))
    assert job.asked == list(asked)


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy(), EVERY_SECOND])
def test_policies_by_time_are_asked_now_and_then(policy: Any) -> None:
    job, mixed = Job(jct.TemporarySavePolicy(policy)), Job(jct.AnySavePolicy([policy, EVERY_TEN]))
    for each in (job, mixed):
        each.decide_all(range(1, 301))
        assert each.asked[0] == 1
    assert len(job.asked) < 60
    assert {*range(10, 301, 10)} <= {*mixed.asked}
    assert len(mixed.asked) < 90


def test_each_process_finds_the_reason_of_the_primary() -> None:
    policy = jct.AnySavePolicy([jct.TemporarySavePolicy(jct.FixedIntervalPolicy(5)), EVERY_TEN])
    for step in range(1, 21):
        assert Job(policy).decide(step) == decide(policy, CheckpointInfo(step, START), (), CONTEXT)
    assert Job(policy).decide(5).temporary
    assert not Job(policy).decide(10).temporary


def test_equal_policies_have_equal_texts() -> None:
    both: list[Any] = [OfUser(), EVERY_TEN]
    text = decided_locally(jct.AnySavePolicy(both))
    assert text == "AnySavePolicy(OfUser, FixedIntervalPolicy(interval=10))"
    assert decided_locally(jct.AnySavePolicy([OfUser(), EVERY_TEN])) == text
    assert decided_locally(jct.AllSavePolicy(both)) != text
    assert decided_locally(jct.EverySecondsPolicy(2)) == decided_locally(EVERY_SECOND)
    assert decided_locally(None) == "no save policy"
