"""Decisions to save in a job of many processes: all decide alike, and ask process 0 only where they have to."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

from jaxckpt_train.steps.policy_context import (
    NOT_DUE,
    CheckpointInfo,
    Decision,
    DecisionContext,
    SavePolicy,
    policy_name,
    saves_temporarily,
)
from jaxckpt_train.steps.save_policies import (
    AllSavePolicy,
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    EverySecondsPolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
    TemporarySavePolicy,
    has_temporary,
)
from jaxckpt_train.steps.ticks import Ticks
from jaxckpt_train.steps.together import Together
from jaxckpt_train.steps.tuned_policies import OverheadBudgetPolicy, YoungDalyPolicy

# They decide by the step, and by what all processes know. What is made of them may decide otherwise.
_BY_STEPS: frozenset[type] = frozenset({FixedIntervalPolicy, SpecificStepsPolicy, PreemptionCheckpointingPolicy})
# They become due in the course of time, so some steps later is as good.
_BY_TIME: frozenset[type] = frozenset(
    {EverySecondsPolicy, ContinuousCheckpointingPolicy, OverheadBudgetPolicy, YoungDalyPolicy}
)


class Outlook(enum.IntEnum):
    """What every process of a job knows of a decision by itself."""

    NO = 0
    SOME_TIME = 1  # process 0 is asked at the next tick
    NOW = 2  # process 0 must be asked about this very step
    YES = 3


class _Answer(msgspec.Struct, array_like=True):
    save: bool
    reason: str
    temporary: bool
    has_steps: bool
    is_over: bool  # whether the save before has ended, as all find out now
    next: int


class JobDecisions:
    """What a policy decides in a job. All processes ask about the same steps, in the same order.

    A policy by steps is decided by each process alone. One by time is asked in process 0, about once a second, which
    tells the others; every other policy, such as a user's, at every step, since nobody knows what it goes by.

    Args:
        together: the processes.
        policy: what decides.
    """

    def __init__(self, together: Together, policy: SavePolicy) -> None:
        self._together, self._policy = together, policy
        self._ticks = Ticks(together.processes)
        self._has_steps = False

    def decide(
        self,
        step: CheckpointInfo,
        context: DecisionContext,
        ask: Callable[[], tuple[Decision, bool]],
        is_over: Callable[[], bool],
        settle: Callable[[], object],
    ) -> Decision:
        """Whether to save a step.

        Args:
            step: the step.
            context: everything else.
            ask: in process 0: what the policy decides, and whether there are steps already.
            is_over: in process 0: whether the save before has ended.
            settle: takes note of how it has ended; called in all processes at the same step.
        """
        found = outlook(self._policy, step, context, has_steps=self._has_steps)
        if found is Outlook.YES:
            known = _known_deciding(self._policy, step, context)
            return Decision(True, " and ".join(map(policy_name, known)), any(map(saves_temporarily, known)))
        if found is Outlook.NO or (found is Outlook.SOME_TIME and not self._ticks.is_due()):
            return NOT_DUE

        def say() -> bytes:
            decision, has_steps = ask()
            following = self._ticks.next() if found is Outlook.SOME_TIME else 0
            decided = (decision.save, decision.reason, decision.temporary)
            return msgspec.msgpack.encode(_Answer(*decided, has_steps, is_over(), following))

        said = self._together.job.broadcast(f"deciding whether to save step {step.step}", say)
        answer = msgspec.msgpack.decode(said, type=_Answer)
        self._has_steps = self._has_steps or answer.has_steps or answer.save
        if found is Outlook.SOME_TIME:
            self._ticks.set_next(answer.next)
        if answer.is_over:
            settle()
        return Decision(answer.save, answer.reason, answer.temporary)


def outlook(policy: SavePolicy, step: CheckpointInfo, context: DecisionContext, *, has_steps: bool) -> Outlook:
    """What is known of the decision about a step, the same in all processes.

    Args:
        policy: what decides.
        step: the step.
        context: of which only what all processes have alike is looked at.
        has_steps: whether it is known that the run has steps.
    """
    kind = type(policy)
    if kind in _BY_STEPS:
        return Outlook.YES if policy.should_save(step, (), context=context) else Outlook.NO
    if kind in _BY_TIME:
        return Outlook.SOME_TIME
    if kind is InitialSavePolicy:
        return Outlook.NO if has_steps else Outlook.NOW
    if kind is TemporarySavePolicy and isinstance(policy, TemporarySavePolicy):
        return outlook(policy.policy, step, context, has_steps=has_steps)
    if isinstance(policy, AnySavePolicy | AllSavePolicy) and kind in (AnySavePolicy, AllSavePolicy):
        found = [outlook(child, step, context, has_steps=has_steps) for child in policy.policies]
        return _of_any(policy.policies, found) if kind is AnySavePolicy else _of_all(found)
    return Outlook.NOW


def decided_alone(policy: SavePolicy | None) -> str:
    """What each process of a job decides without the others, as text: where that differs, they save other steps."""
    kind = type(policy)
    if policy is None:
        return "no save policy"
    if kind in _BY_STEPS:
        return policy_name(policy)
    if kind in _BY_TIME:
        return "a policy by time"
    if kind is InitialSavePolicy:
        return "InitialSavePolicy()"
    if kind is TemporarySavePolicy and isinstance(policy, TemporarySavePolicy):
        return f"TemporarySavePolicy({decided_alone(policy.policy)})"
    if isinstance(policy, AnySavePolicy | AllSavePolicy) and kind in (AnySavePolicy, AllSavePolicy):
        return f"{kind.__name__}({', '.join(map(decided_alone, policy.policies))})"
    return "a policy that process 0 is asked about at every step"


def _known_deciding(policy: SavePolicy, step: CheckpointInfo, context: DecisionContext) -> list[SavePolicy]:
    """Of a policy whose outlook is YES: what in it asks for the save by itself."""
    if not isinstance(policy, AnySavePolicy | AllSavePolicy):
        return [policy]
    sure = [each for each in policy.policies if outlook(each, step, context, has_steps=True) is Outlook.YES]
    if isinstance(policy, AnySavePolicy):  # the first that asks for a step that stays
        sure = sorted(sure, key=has_temporary)[:1]
    return [inner for each in sure for inner in _known_deciding(each, step, context)]


def _of_any(policies: Sequence[SavePolicy], found: Sequence[Outlook]) -> Outlook:
    """What saves for sure decides; where that saves a step that goes, the others are asked whether it is to stay."""
    if max(found) is not Outlook.YES:
        return max(found)
    each = list(zip(policies, found, strict=True))
    goes = all(has_temporary(policy) for policy, sure in each if sure is Outlook.YES)
    may_stay = any(maybe in (Outlook.SOME_TIME, Outlook.NOW) for policy, maybe in each if not saves_temporarily(policy))
    return Outlook.NOW if goes and may_stay else Outlook.YES


def _of_all(found: Sequence[Outlook]) -> Outlook:
    """Where some know it of this very step, the others are asked about this one, too."""
    if Outlook.NO in found or len(set(found)) == 1:
        return min(found)
    return Outlook.NOW
