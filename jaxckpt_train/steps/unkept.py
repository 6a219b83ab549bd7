"""Which generations of steps nobody keeps: neither the policy, nor a pin, nor doubt about what they are."""

from __future__ import annotations

from collections.abc import Sequence, Set

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import newest_generations
from jaxckpt_train.steps.policy_context import DecisionContext, PreservationPolicy, steps_to_delete


def unkept_names(
    entries: Sequence[Entry],
    line: Sequence[Entry],
    left: Set[str],
    policy: PreservationPolicy | None,
    context: DecisionContext,
) -> set[str]:
    """The names of what may be deleted. The newest step of the line is never among them.

    What a roll-back has left behind is not counted by the policy; it goes when the run has saved the same step again,
    unless it is pinned. What is damaged stays for ever, and what is held until somebody knows more of it.

    Args:
        entries: all generations of all steps.
        line: those that the run descends from.
        left: the names of what a roll-back has left behind.
        policy: which steps are kept; None: all but temporary ones.
        context: for the policy.
    """
    newest = newest_generations([entry for entry in line if not entry.is_held])
    saved, steps = {entry.step for entry in newest}, _steps_to_delete(newest, policy, context)
    unkept = {entry.name for entry in entries if entry.step in saved} - {entry.name for entry in newest}
    unkept -= {entry.name for entry in entries if entry.pinned and entry.name in left}
    unkept -= {entry.name for entry in entries if entry.damaged is not None or entry.is_held}
    unkept |= {entry.name for entry in newest if entry.step in steps}
    return unkept - {entry.name for entry in newest[-1:]}


def _steps_to_delete(newest: Sequence[Entry], policy: PreservationPolicy | None, context: DecisionContext) -> Set[int]:
    if policy is None:
        return {entry.step for entry in newest[:-1] if entry.temporary and not entry.pinned}
    return steps_to_delete([entry.info() for entry in newest], policy, context=context)


def replaced(
    unkept: Set[str], whole: Sequence[Entry], line: Sequence[Entry], *, is_durable: bool
) -> tuple[set[str], list[str]]:
    """Those of what nobody keeps that may go now, and what must be on the disk before: what replaces them, the newest.

    None that is replaced by something which the disk has refused to keep.

    Args:
        unkept: the names of what nobody keeps.
        whole: all generations of all steps that are whole.
        line: those that the run descends from, the newest last.
        is_durable: whether the newest is on the disk already.
    """
    newest = [entry for entry in line if not entry.is_held][-1:]
    if not is_durable and any(entry.is_unsynced for entry in newest):
        return set(), []
    kept = [entry for entry in whole if entry.name not in unkept and not entry.is_held]
    doubtful = {entry.step for entry in kept if entry.is_unsynced}
    doomed = {*unkept} - {entry.name for entry in whole if entry.step in doubtful}
    steps, names = {entry.step for entry in whole if entry.name in doomed}, [entry.name for entry in newest]
    others = [entry.name for entry in whole if entry.step in steps and entry.name not in {*doomed, *names}]
    return doomed, [*others, *([] if is_durable else names)]
