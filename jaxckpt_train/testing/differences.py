"""What is wrong with the batches that a run takes after a resume, told by those of a run without an interruption.

Where two runs differ: in what they go on from, the batches, what they tell of an update, or the state after it.

The numbers in leaves of two runs, and how far, and in which direction, they are apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.processes import Batch, Leaf, Leaves, Update

_SAME_DIRECTION = 0.02
Kind = Literal["start", "restored", "label", "batch", "metric", "leaf", "end"]
DataFault = Literal["anew", "ahead", "behind", "order", "parts", "other"]
"""They begin anew; some are skipped, or come twice; the same examples in another order; only some arrays are others."""


def relative_difference(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """The largest difference in relation to the largest value; inf if it cannot be told."""
    if one is None or other is None or one.shape != other.shape or not one.size:
        return np.inf
    largest = float(np.max(np.abs(one)))
    difference = float(np.max(np.abs(one - other)))
    return difference / largest if largest > 0 and np.isfinite(difference) else np.inf


def number_of(attempt: Attempt, leaf: Leaf) -> np.ndarray | None:
    """The data of a leaf as float64 or complex128; None: it has no numbers, or they were not kept."""
    if leaf.kind == "python float":
        return np.asarray(float.fromhex(leaf.content.decode()))
    if leaf.kind in ("python int", "python complex") and leaf.content:
        return np.asarray(complex(leaf.content.decode()))
    if leaf.kind == "python bool":
        return np.asarray(float(leaf.content == b"True"))
    array = attempt.array(leaf)
    if array is None:
        return None
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def whole_numbers(attempt: Attempt, leaf: Leaf) -> np.ndarray | None:
    """The data of a leaf as Python integers, exact however large they are; None: it has no integers, or none kept."""
    if leaf.kind == "python int" and leaf.content:
        return np.array(int(leaf.content.decode()), dtype=object)
    array = attempt.array(leaf)
    return array.astype(object) if array is not None and array.dtype.kind in "iu" else None


def common_factor(moves: Sequence[Sequence[np.ndarray]]) -> float | None:
    """If all leaves have moved in one direction in two runs: how much further in the second; None: they have not.

    Args:
        moves: of each leaf: before the update, and after it in both runs, flat.
    """
    if not moves or any(len({array.shape for array in each}) != 1 for each in moves):
        return None
    old, straight, resumed = (np.concatenate([each[place] for each in moves]) for place in range(3))
    expected, found = straight - old, resumed - old
    size = float(expected @ expected)
    if size == 0 or not np.isfinite(found).all() or not np.isfinite(size):
        return None
    factor = float(expected @ found) / size
    # What rounding of the state itself makes of a small move is no other direction.
    rounding = 4 * np.finfo(np.float32).eps * float(np.linalg.norm(old))
    is_same = np.linalg.norm(found - factor * expected) <= _SAME_DIRECTION * np.linalg.norm(found) + rounding
    return factor if is_same and abs(factor - 1) > _SAME_DIRECTION else None


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


def fault_of(found: Difference, attempts: Sequence[Attempt], straight: Attempt) -> tuple[DataFault, int]:
    """What is wrong with the batches from a difference on, and of how many if they are skipped or come twice."""
    attempt = attempts[found.number]
    expected = _batches(update for update in straight.updates)
    taken = _batches(update for update in attempt.updates if update.step >= found.step)
    if not taken or not expected:
        return "other", 0
    before = len(_batches(update for update in straight.updates if update.step < found.step))
    at = [place for place, batch in enumerate(expected) if _is_continued(expected, place, taken)]
    if 0 in at and attempt.resumed_at is not None and before:
        return "anew", before
    if at:
        offset = min((place - before for place in at), key=abs)
        if offset == 0 and isinstance(found.straight, int) and isinstance(found.resumed, int):
            offset = found.resumed - found.straight  # each start takes so many ahead
        return ("ahead" if offset > 0 else "behind"), abs(offset)
    if isinstance(found.straight, Batch) and isinstance(found.resumed, Batch):
        return _of_content(found.straight, found.resumed, expected), 0
    return "other", 0


def _batches(updates: Iterable[Update]) -> list[Batch]:
    return [batch for update in updates for batch in update.batches]


def _is_continued(expected: Sequence[Batch], place: int, taken: Sequence[Batch]) -> bool:
    """Whether the batches that were taken are those from a place on, as far as both go."""
    return all(one.digest == other.digest for one, other in zip(expected[place:], taken, strict=False))


def _of_content(straight: Batch, resumed: Batch, expected: Sequence[Batch]) -> DataFault:
    known = {row for batch in expected for row in batch.rows}
    digests = {batch.digest for batch in expected}
    if resumed.digest in digests or (resumed.rows and known.intersection(resumed.rows)):
        return "order"
    common = straight.leaves.keys() & resumed.leaves.keys()
    return "parts" if any(straight.leaves[name].same(resumed.leaves[name]) for name in common) else "other"
