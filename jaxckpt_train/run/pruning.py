"""Which steps of a run expire: those that neither the preservation policy, nor a pin, nor an open question keeps.

`expired_names` and `replaced` decide for the owner of a run. `fates` explains the same decision, for `jaxckpt prune`.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence, Set

from jaxckpt_train.policies.context import (
    CheckpointInfo,
    DecisionContext,
    PreservationPolicy,
    ask_to_preserve,
    steps_to_delete,
)
from jaxckpt_train.run.entry import Entry, RollBack, left_behind, newest_generations


def expired_names(
    entries: Sequence[Entry],
    line: Sequence[Entry],
    left: Set[str],
    policy: PreservationPolicy | None,
    context: DecisionContext,
) -> set[str]:
    """The names of the steps that may be deleted. The newest step of the branch is never among them.

    A step that a roll-back left behind does not count for the policy; it expires when the run has saved the same step
    again, unless it is pinned. Damaged steps are never deleted, held steps not until their state is known.

    Args:
        entries: all generations of all steps.
        line: the entries of the current branch.
        left: the names of the steps that a roll-back left behind.
        policy: which steps are kept; None: all but temporary ones.
        context: the context for the policy.
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
    """The expired steps that may be deleted now, and the steps that must be on the disk before, newest last.

    A step is not deleted if the disk has refused to sync the step that replaces it.

    Args:
        unkept: the names of the expired steps.
        whole: all intact generations of all steps.
        line: the entries of the current branch, newest last.
        is_durable: whether the newest step is on the disk already.
    """
    newest = [entry for entry in line if not entry.is_held][-1:]
    if not is_durable and any(entry.is_unsynced for entry in newest):
        return set(), []
    kept = [entry for entry in whole if entry.name not in unkept and not entry.is_held]
    doubtful = {entry.step for entry in kept if entry.is_unsynced}
    pending_deletions = {*unkept} - {entry.name for entry in whole if entry.step in doubtful}
    steps, names = {entry.step for entry in whole if entry.name in pending_deletions}, [entry.name for entry in newest]
    others = [entry.name for entry in whole if entry.step in steps and entry.name not in {*pending_deletions, *names}]
    return pending_deletions, [*others, *([] if is_durable else names)]


class Pruning:
    """A preservation policy that keeps what one of several policies keeps, and what is safe for another reason.

    Args:
        policies: the user's policies, by the names that reasons give.

    Attributes:
        safe: why a step is kept regardless of the policies, by step.
    """

    def __init__(self, policies: Mapping[str, PreservationPolicy]) -> None:
        self.policies, self.safe = dict(policies), dict[int, str]()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """Keep a step if one of the policies keeps it or it is safe."""
        answers = [ask_to_preserve(policy, checkpoints, context=context) for policy in self.policies.values()]
        answers.append([info.step in self.safe for info in checkpoints])
        return [any(flags) for flags in zip(*answers, strict=True)]

    def reasons(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> Mapping[int, list[str]]:
        """The names of the policies that keep each step."""
        found: dict[int, list[str]] = {info.step: [] for info in checkpoints}
        for name, policy in self.policies.items():
            flags = ask_to_preserve(policy, checkpoints, context=context)
            for info, keeps in zip(checkpoints, flags, strict=True):
                found[info.step] += [name] if keeps else []
        return found


@dataclasses.dataclass(frozen=True)
class Fate:
    """The decision about one generation of a step.

    Attributes:
        entry: the generation.
        goes: whether it is deleted.
        why: the reasons, at least one.
    """

    entry: Entry
    goes: bool
    why: tuple[str, ...]


def current_line(entries: Sequence[Entry], roll_back: RollBack) -> list[Entry]:
    """The intact steps that the run descends from, in the order of the saves, newest last."""
    left = left_behind(entries, roll_back)
    return [entry for entry in entries if entry.damaged is None and entry.name not in left]


def fates(entries: Sequence[Entry], roll_back: RollBack, pruning: Pruning, now: datetime.datetime) -> list[Fate]:
    """The decision about each step that the owner of the run would take, in the order of the saves.

    Args:
        entries: all steps of the run, in the order of the saves.
        roll_back: the last noted roll-back.
        pruning: the policies.
        now: the current time, for the policies.
    """
    line, context = current_line(entries, roll_back), DecisionContext(now)
    left, whole = left_behind(entries, roll_back), [entry for entry in entries if entry.damaged is None]
    unkept = expired_names(entries, line, left, pruning, context)
    pending_deletions, _ = replaced(unkept, whole, line, is_durable=False)
    newest = newest_generations([entry for entry in line if not entry.is_held])
    lasting = sorted((entry.info() for entry in newest if not entry.temporary), key=lambda info: info.step)
    kept_by, listed = pruning.reasons(lasting, context=context), {entry.step: entry.name for entry in newest}
    always, fated = _always(newest), []
    for entry in entries:
        if entry.name in pending_deletions:
            fated.append(Fate(entry, True, (_why_it_goes(entry, listed),)))
            continue
        reasons = [always[entry.name]] if entry.name in always else []
        reasons += _why_it_stays(entry, left)
        if listed.get(entry.step) == entry.name:
            reasons += [pruning.safe[entry.step]] if entry.step in pruning.safe else []
            reasons += kept_by.get(entry.step, [])
        fated.append(Fate(entry, False, tuple(reasons) or ("the disk refused to sync the step that replaces it",)))
    return fated


def _always(newest: Sequence[Entry]) -> Mapping[str, str]:
    """The steps that every policy keeps, by name, with the reason."""
    if not newest:
        return {}
    highest = max(newest, key=lambda entry: entry.step)
    return {highest.name: "highest", newest[-1].name: "newest"}


def _why_it_goes(entry: Entry, listed: Mapping[int, str]) -> str:
    instead = listed.get(entry.step, entry.name)
    if instead != entry.name:
        return f"saved again as {instead}"
    return "temporary, and a later step is committed" if entry.temporary else "no policy keeps it"


def _why_it_stays(entry: Entry, left: frozenset[str]) -> list[str]:
    """The reasons other than policies."""
    reasons = []
    if entry.damaged is not None:
        reasons.append("set aside as damaged")
    if entry.is_held:
        reasons.append("its manifest or its notes cannot be read")
    if entry.pinned:
        reasons.append("pinned")
    if entry.name in left:
        reasons.append("left behind by a roll-back, until its step is saved again")
    return reasons
