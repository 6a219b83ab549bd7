"""What becomes of each step of a run if a preservation policy is asked now: which go, which stay, and why.

Which generations of steps nobody keeps: neither the policy, nor a pin, nor doubt about what they are.
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
    pending_deletions = {*unkept} - {entry.name for entry in whole if entry.step in doubtful}
    steps, names = {entry.step for entry in whole if entry.name in pending_deletions}, [entry.name for entry in newest]
    others = [entry.name for entry in whole if entry.step in steps and entry.name not in {*pending_deletions, *names}]
    return pending_deletions, [*others, *([] if is_durable else names)]


class Pruning:
    """Keeps what one of its policies keeps, and what must not go for another reason.

    Args:
        policies: of the user, by how reasons name them.

    Attributes:
        safe: why a step stays whatever the policies say, by step.
    """

    def __init__(self, policies: Mapping[str, PreservationPolicy]) -> None:
        self.policies, self.safe = dict(policies), dict[int, str]()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True where one of the policies says so, or the step is safe."""
        answers = [ask_to_preserve(policy, checkpoints, context=context) for policy in self.policies.values()]
        answers.append([info.step in self.safe for info in checkpoints])
        return [any(flags) for flags in zip(*answers, strict=True)]

    def reasons(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> Mapping[int, list[str]]:
        """By step: the names of the policies that keep it."""
        found: dict[int, list[str]] = {info.step: [] for info in checkpoints}
        for name, policy in self.policies.items():
            flags = ask_to_preserve(policy, checkpoints, context=context)
            for info, keeps in zip(checkpoints, flags, strict=True):
                found[info.step] += [name] if keeps else []
        return found


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of one generation of a step.

    Attributes:
        entry: which.
        goes: whether nobody keeps it.
        why: the reasons, at least one.
    """

    entry: Entry
    goes: bool
    why: tuple[str, ...]


def current_line(entries: Sequence[Entry], roll_back: RollBack) -> list[Entry]:
    """The steps that a run goes on from, as they were saved, the newest last; none that was set aside as damaged."""
    left = left_behind(entries, roll_back)
    return [entry for entry in entries if entry.damaged is None and entry.name not in left]


def fates(entries: Sequence[Entry], roll_back: RollBack, pruning: Pruning, now: datetime.datetime) -> list[Fate]:
    """What becomes of each step, by what the owner of the run would decide; in the order of the saves.

    Args:
        entries: all steps of the run, in the order of the saves.
        roll_back: the last one that was noted.
        pruning: what is kept.
        now: the time, for policies.
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
        fated.append(Fate(entry, False, tuple(reasons) or ("the disk has refused to keep what replaces it",)))
    return fated


def _always(newest: Sequence[Entry]) -> Mapping[str, str]:
    """What stays under every policy, by name."""
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
    """The reasons beside policies."""
    reasons = []
    if entry.damaged is not None:
        reasons.append("set aside as damaged")
    if entry.is_held:
        reasons.append("its manifest, or what was noted of it, cannot be read")
    if entry.pinned:
        reasons.append("pinned")
    if entry.name in left:
        reasons.append("left behind by a roll-back, until its step is saved again")
    return reasons
