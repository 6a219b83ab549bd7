"""Where two runs differ: in what they go on from, the batches, what they tell of an update, or the state after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.leaf_numbers import number_of, whole_numbers
from jaxckpt_train.testing.records import Batch, Leaf, Leaves, Update

Kind = Literal["start", "restored", "label", "batch", "metric", "leaf", "end"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        kind: "start": what both begin with, of the same update 0. "restored": what a resume gave, and what there was
            after the update that it resumed at. "label": the number of the update. "end": how far they got.
        number: of the process of the interrupted run, from 0.
        step: of the update.
        position: how many updates after its start.
        name: of the leaf, or the metric; the number of the batch among those of its update.
        straight, resumed: what it is in the uninterrupted and in the other run; None: it is not there. A number: how
            many batches they take, or which update it is.
        differing, of: how many leaves, or metrics, differ there, of how many.
    """

    kind: Kind
    number: int
    step: int
    position: int
    name: str = ""
    straight: Leaf | Batch | int | None = None
    resumed: Leaf | Batch | int | None = None
    differing: int = 1
    of: int = 1


def differences(attempts: Sequence[Attempt], straight: Attempt) -> Iterator[Difference]:
    """All differences of an interrupted run from an uninterrupted one, in the order in which they come about."""
    for number, attempt in enumerate(attempts):
        yield from _at_start(number, attempt, straight)
        wanted = [update for update in straight.updates if update.step > (attempt.resumed_at or 0)]
        for position, update in enumerate(attempt.updates, 1):
            if position > len(wanted):
                yield Difference("end", number, update.step, position, "", straight.last, attempt.last)
                return
            expected = wanted[position - 1]
            if expected.step != update.step:
                yield Difference("label", number, expected.step, position, "", expected.step, update.step)
                return
            yield from _in_update(number, position, expected, update)
        if number == len(attempts) - 1 and len(attempt.updates) < len(wanted):
            step = wanted[len(attempt.updates)].step
            yield Difference("end", number, step, len(attempt.updates) + 1, "", straight.last, attempt.last)


def firsts(found: Iterator[Difference]) -> dict[Kind, Difference]:
    """The first difference of each kind, in the order in which these come."""
    kinds: dict[Kind, Difference] = {}
    for difference in found:
        kinds.setdefault(difference.kind, difference)
    return kinds


def _at_start(number: int, attempt: Attempt, straight: Attempt) -> Iterator[Difference]:
    step = attempt.resumed_at
    if step is None:
        yield from _of_leaves("start", number, 0, 0, straight.start.leaves, attempt.start.leaves)
    elif step == 0 or step in straight.by_step:
        expected = straight.by_step[step].leaves if step in straight.by_step else straight.start.leaves
        names = {name.partition("/")[0] for name in attempt.start.leaves}
        known = {
            name: _in_form_of(attempt.start.leaves.get(name), leaf, attempt, straight)
            for name, leaf in expected.items()
            if name.partition("/")[0] in names
        }
        yield from _of_leaves("restored", number, step, 0, known, attempt.start.leaves)


def _in_form_of(target: Leaf | None, leaf: Leaf, attempt: Attempt, straight: Attempt) -> Leaf:
    """A scalar comes back in the form of its target, such as a Python int: if it is the same number, as that leaf."""
    if target is None or target.kind == leaf.kind or target.shape or leaf.shape:
        return leaf
    restored, saved = whole_numbers(attempt, target), whole_numbers(straight, leaf)
    if restored is not None and saved is not None:
        return target if restored.item() == saved.item() else leaf
    restored, saved = number_of(attempt, target), number_of(straight, leaf)
    is_same = restored is not None and saved is not None and np.array_equal(restored, saved, equal_nan=True)
    return target if is_same else leaf


def _in_update(number: int, position: int, expected: Update, update: Update) -> Iterator[Difference]:
    if not (expected.elsewhere or update.elsewhere):
        yield from _of_batches(number, position, expected, update)
    yield from _of_leaves("metric", number, update.step, position, expected.metrics, update.metrics)
    yield from _of_leaves("leaf", number, update.step, position, expected.leaves, update.leaves)


def _of_batches(number: int, position: int, expected: Update, update: Update) -> Iterator[Difference]:
    counts = len(expected.batches), len(update.batches)
    for place, pair in enumerate(zip(expected.batches, update.batches, strict=False), 1):
        if pair[0].digest != pair[1].digest:
            yield Difference("batch", number, update.step, position, str(place), *pair, 1, max(counts))
            return
    if counts[0] != counts[1]:
        yield Difference("batch", number, update.step, position, "", *counts)


def _of_leaves(
    kind: Kind, number: int, step: int, position: int, straight: Leaves, resumed: Leaves
) -> Iterator[Difference]:
    names = [*straight, *(name for name in resumed if name not in straight)]
    differing = [name for name in names if not _same(straight.get(name), resumed.get(name))]
    if differing:
        first = differing[0]
        pair = straight.get(first), resumed.get(first)
        yield Difference(kind, number, step, position, first, *pair, len(differing), len(names))


def _same(first: Leaf | None, second: Leaf | None) -> bool:
    return first is not None and second is not None and first.same(second)
