"""What the records of runs that differ say about why: facts, each looked up when a cause asks for it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.store.dtypes import is_inexact
from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.data_faults import DataFault, fault_of
from jaxckpt_train.testing.differences import Difference, Kind
from jaxckpt_train.testing.leaf_numbers import common_factor, number_of, relative_difference
from jaxckpt_train.testing.records import Between, Leaf, Update

_OPTIMIZER = re.compile(
    r"(^|[/_.])(opt|optim|optimizer|adam\w*|sgd|mu|nu|trace|momentum|velocity|moments?)($|[/_.])", re.I
)
_RATE = re.compile(r"(^|[/_. ])(lr|learning_?rate|step_?size|schedule)($|[/_. ])", re.I)
_WHOLE = ("int", "uint", "python int")
ROUNDING = 1e-4
"""Relative differences below this look like another order of floating-point sums."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Of runs that differ.

    Attributes:
        attempts: of the interrupted run.
        straight: the uninterrupted run.
        kinds: the first difference of each kind between these, the earliest first.
        twin: the same between the uninterrupted run and `again`, if that differs too.
        again: its repetition; or the interrupted run, which differs before its interruption.
    """

    attempts: Sequence[Attempt]
    straight: Attempt
    kinds: dict[Kind, Difference]
    twin: dict[Kind, Difference]
    again: Attempt

    @property
    def first(self) -> Difference:
        """The first difference of all."""
        return next(iter(self.kinds.values()))

    @property
    def attempt(self) -> Attempt:
        """The process in which the first difference came about."""
        return self.attempts[self.first.number]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """What the loop gave to `resume`."""
        return self.attempt.start.names

    @functools.cached_property
    def never_restored(self) -> list[str]:
        """What the loop gives to `ckpt(...)` and not to `resume`."""
        saved = {name.partition("/")[0] for update in self.attempt.updates[:1] for name in update.leaves}
        return sorted(saved - set(self.names))

    @functools.cached_property
    def sees_batches(self) -> bool:
        """Whether any batch was seen, and can be compared."""
        batches = [batch for update in self.straight.updates for batch in update.batches]
        return bool(batches) and self.unseen is None

    @functools.cached_property
    def unseen(self) -> str | None:
        """What is in batches of which only the type can be compared; None: nothing."""
        each = (batch.unseen() for update in self.straight.updates for batch in update.batches)
        return next((found for found in each if found is not None), None)

    @functools.cached_property
    def takes_elsewhere(self) -> bool:
        """Whether batches were taken on other threads than the loop's."""
        return any(update.elsewhere for update in [*self.straight.updates, *self.attempt.updates])

    @functools.cached_property
    def has_key(self) -> bool:
        """Whether a PRNG key is saved: a typed one, or what looks like the data of one."""
        return any(
            leaf.kind.startswith("key<") or (leaf.kind == "uint32" and leaf.shape[-1:] in ((2,), (4,)))
            for leaf in self.straight.updates[0].leaves.values()
        )

    @functools.cached_property
    def has_optimizer(self) -> bool:
        """Whether something is saved that is named as an optimizer's state is."""
        return any(_OPTIMIZER.search(name) for name in self.straight.updates[0].leaves)

    @functools.cached_property
    def rate_metric(self) -> str | None:
        """A metric that is named as a learning rate is, and differs where the first difference is."""
        straight, resumed = self._pair(self.first.step)
        if straight is None or resumed is None:
            return None
        names = [name for name in straight.metrics if _RATE.search(name)]
        different = [n for n in names if n in resumed.metrics and not straight.metrics[n].same(resumed.metrics[n])]
        return different[0] if different else None

    @functools.cached_property
    def drawn_from(self) -> list[str]:
        """The global random generators that the loop draws from, and that are not where they were."""
        first = self.first
        straight, resumed = self._pair(first.step)
        before = self._host_before(self.straight, first.step)
        if straight is None or resumed is None or before is None:
            return []
        moved = [name for name, state in straight.host.items() if before.get(name) != state]
        return [name for name in moved if resumed.host.get(name) != straight.host[name]]

    def _host_before(self, attempt: Attempt, step: int) -> dict[str, str] | None:
        earlier = [update for update in attempt.updates if update.step < step]
        return earlier[-1].host if earlier else (attempt.start.host if attempt.starts else None)

    def _pair(self, step: int) -> tuple[Update | None, Update | None]:
        return self.straight.by_step.get(step), self.attempt.by_step.get(step)

    @functools.cached_property
    def is_rounding(self) -> bool:
        """Whether what differs first of the repetition differs by no more than another order of sums would make."""
        for found in self.twin.values():
            if (
                found.kind in ("metric", "leaf")
                and isinstance(found.straight, Leaf)
                and isinstance(found.resumed, Leaf)
            ):
                pair = number_of(self.straight, found.straight), number_of(self.again, found.resumed)
                return relative_difference(*pair) < ROUNDING
        return False

    @functools.cached_property
    def whole_numbers(self) -> list[str]:
        """The leaves that differ in the update of the first difference, if all of them are whole numbers."""
        straight, resumed = self._pair(self.first.step)
        if straight is None or resumed is None:
            return []
        pairs = {name: (leaf, resumed.leaves.get(name)) for name, leaf in straight.leaves.items()}
        different = {name: leaf for name, (leaf, other) in pairs.items() if other is None or not leaf.same(other)}
        return list(different) if all(leaf.kind.startswith(_WHOLE) for leaf in different.values()) else []

    @functools.cached_property
    def starts_as_at_first(self) -> str | None:
        """A counter in the state that is, after the first updates since the resume, what it was after those of the run.

        Then the loop has gone on with the state that it gave to `resume`, and not with what that returned.
        """
        first, start = self.first, self.attempt.resumed_at
        if first.kind not in ("leaf", "metric") or start is None or first.position > len(self.straight.updates):
            return None
        early, late = self.straight.updates[first.position - 1], self.straight.by_step.get(first.step)
        found = self.attempt.by_step.get(first.step)
        if late is None or found is None or early.step == late.step:
            return None
        for name, leaf in found.leaves.items():
            is_counter = leaf.shape == () and leaf.kind.startswith(_WHOLE)
            if is_counter and name in early.leaves and name in late.leaves:
                if leaf.same(early.leaves[name]) and not leaf.same(late.leaves[name]):
                    return name
        return None

    @functools.cached_property
    def metrics_that_differ_anyway(self) -> list[str]:
        """If two runs differ of which none was interrupted, and in nothing but their metrics: which metrics do."""
        kinds = self.kinds if self.again is self.attempts[0] else self.twin
        if set(kinds) != {"metric"}:
            return []
        found: dict[str, None] = {}
        for update in self.straight.updates:
            other = self.again.by_step.get(update.step)
            pairs = (
                {}
                if other is None
                else {name: (leaf, other.metrics.get(name)) for name, leaf in update.metrics.items()}
            )
            found |= {name: None for name, (leaf, its) in pairs.items() if its is None or not leaf.same(its)}
        return list(found)

    @functools.cached_property
    def tells_what_was_restored(self) -> bool:
        """Whether the first update after the resume has left all as it was restored, and in the other run it did not.

        Then the loop has given `ckpt(...)` what it had before the update.
        """
        start = self.attempt.resumed_at
        if start is None or not self.attempt.updates or self.first.kind not in ("leaf", "metric"):
            return False
        restored, update = self.attempt.start.leaves, self.attempt.updates[0]
        before, after = self.straight.by_step.get(start), self.straight.by_step.get(update.step)
        if before is None or after is None or not update.leaves:
            return False
        stays = all(name in restored and leaf.same(restored[name]) for name, leaf in update.leaves.items())
        moves = any(name in before.leaves and not leaf.same(before.leaves[name]) for name, leaf in after.leaves.items())
        return stays and moves

    @functools.cached_property
    def between(self) -> Between | None:
        """What the uninterrupted run does between the update that was resumed at and the next, where they part."""
        is_first = self.first.position == 1 and self.first.kind in ("leaf", "metric")
        return self.straight.between.get(self.attempt.resumed_at or 0) if is_first else None

    @property
    def was_exact_elsewhere(self) -> bool:
        """Whether a resume at another step was exact, and the first update after this one is not."""
        at_other_steps = self.first.number > 1 or self.attempts[0].plan.saves_first
        return at_other_steps and self.first.position == 1

    @functools.cached_property
    def factor(self) -> float | None:
        """If all that differs of the state has moved in the same direction in both runs: how much further it has.

        Of one update, on the same batch and from the same state: that is what another learning rate does.
        """
        first, start = self.first, self.attempt.resumed_at
        if start is None or first.kind not in ("leaf", "metric") or first.position != 1:
            return None
        straight, resumed = self._pair(first.step)
        before = self.straight.by_step.get(start)
        if straight is None or resumed is None or before is None:
            return None
        moves = []
        for name, leaf in straight.leaves.items():
            other, old = resumed.leaves.get(name), before.leaves.get(name)
            if other is None or old is None or leaf.same(other):
                continue
            arrays = self.straight.array(old), self.straight.array(leaf), self.attempt.array(other)
            if any(array is None or not is_inexact(array.dtype) for array in arrays):
                return None
            moves.append([np.asarray(array).astype(np.float64).reshape(-1) for array in arrays])
        return common_factor(moves)

    @functools.cached_property
    def data_fault(self) -> tuple[DataFault, int]:
        """What is wrong with the batches, and by how many they are off (of "ahead" and "behind")."""
        return fault_of(self.kinds["batch"], self.attempts, self.straight)
