"""What `jaxckpt prune` would let go: each step of a run with what becomes of it, and how many bytes that frees."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable

from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, NotACheckpointError, StorageError
from jaxckpt_train.looking.run_links import links_to_steps
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.looking.whole_steps import newest_whole_step
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import newest_generations
from jaxckpt_train.steps.notes import Notes
from jaxckpt_train.steps.preservation_policies import BestN
from jaxckpt_train.steps.pruning import Fate, Pruning, current_line, fates
from jaxckpt_train.store.backend import Backend


@dataclasses.dataclass(frozen=True)
class Planned:
    """What becomes of one step.

    Attributes:
        look: which one, with what else is known of it.
        goes: whether nobody keeps it.
        why: the reasons.
    """

    look: StepLook
    goes: bool
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What becomes of all steps, lowest first.

    Attributes:
        steps: of the run, also those that are not committed, which stay.
        damaged: what is wrong with steps that are newer than the newest whole one, by step.
        refused: why others of these could not be read, by step.
    """

    steps: list[Planned]
    damaged: dict[int, str]
    refused: dict[int, StorageError]

    @property
    def going(self) -> list[Planned]:
        """Those that go."""
        return [each for each in self.steps if each.goes]

    @property
    def freed_bytes(self) -> int:
        """How many bytes of data these have, as far as is known."""
        return sum(each.look.nbytes or 0 for each in self.going)


def plan_pruning(
    backend: Backend,
    directory: str,
    pruning: Pruning,
    now: datetime.datetime,
    *,
    every_byte: bool,
    reading: Callable[[int], None] = lambda nbytes: None,
) -> PrunePlan:
    """Tell what becomes of each step. The newest whole step and what links stand for become safe in `pruning`.

    Args:
        backend, directory: where the run is.
        pruning: what is kept.
        now: the time, for policies.
        every_byte: whether all bytes of the newest step are compared; if it is damaged, those of the one before, too.
        reading: called with numbers of bytes as they are read for that.

    Raises:
        NotACheckpointError: there is no run.
        CorruptCheckpointError: none of its steps is whole.
        MismatchError: no step has the metric by which the best are kept.
        StorageError: none that can be read is whole.
    """
    looks = look_at_run(backend, directory)
    entries = sorted((look.entry for look in looks if look.entry is not None), key=lambda entry: entry.order)
    if not entries:
        raise NotACheckpointError(f"{directory}: expected a run, found no committed steps in it")
    _refuse_unknown_metrics(directory, pruning, entries)
    roll_back = Notes(backend, directory).roll_back
    newest = newest_generations(current_line(entries, roll_back))
    found = newest_whole_step(backend, directory, newest, every_byte=every_byte, progress=reading)
    if found.entry is None and found.refused:
        raise next(iter(found.refused.values()))
    if found.entry is None:
        raise CorruptCheckpointError(f"{directory}: none of its steps is whole, so all stay; `jaxckpt scrub` tells why")
    links = links_to_steps(backend, directory)
    pruning.safe |= {entry.step: f"the link {links[entry.name]!r}" for entry in newest if entry.name in links}
    pruning.safe |= {found.entry.step: "newest that is whole"} if found.damaged or found.refused else {}
    pruning.safe |= {step: f"cannot be read: {error}" for step, error in found.refused.items()}
    pruning.safe |= {step: f"damaged: {problem}" for step, problem in found.damaged.items()}
    by_name = {fate.entry.name: fate for fate in fates(entries, roll_back, pruning, now)}
    return PrunePlan([_planned(look, by_name.get(look.name)) for look in looks], found.damaged, found.refused)


def _planned(look: StepLook, fate: Fate | None) -> Planned:
    if fate is None:
        return Planned(look, False, (f"not committed: {look.problem}",))
    return Planned(look, fate.goes, fate.why)


def _refuse_unknown_metrics(directory: str, pruning: Pruning, entries: list[Entry]) -> None:
    """A name that is misspelt would keep all, or the wrong ones."""
    there = sorted({name for entry in entries for name in entry.metrics or ()})
    for policy in pruning.policies.values():
        if isinstance(policy, BestN) and policy.metric not in there:
            raise MismatchError(
                f"{directory}: expected steps with the metric {policy.metric!r}, found none; the metrics that they "
                f"have: {', '.join(there) or 'none'}"
            )
