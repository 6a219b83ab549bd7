"""Compares the records of two runs: their starts, batches, metrics and states, and the numbers in differing leaves.

`differences` yields the differences in order. `fault_of` says what is wrong with the batches after a resume, from the
batches of an uninterrupted run.
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
"""Batches restart; are skipped; come twice; have the same examples in another order; differ in some arrays only."""


def relative_difference(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """Return the largest absolute difference divided by the largest absolute value, or inf if it is undefined."""
    if one is None or other is None or one.shape != other.shape or not one.size:
        return np.inf
    largest = float(np.max(np.abs(one)))
    difference = float(np.max(np.abs(one - other)))
    return difference / largest if largest > 0 and np.isfinite(difference) else np.inf


def number_of(attempt: Attempt, leaf: Leaf) -> np.ndarray | None:
    """Return the data of a leaf as float64 or complex128; None: no numbers, or they were not kept."""
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
    """Return the data of a leaf as Python integers, which are exact; None: no integers, or they were not kept."""
    if leaf.kind == "python int" and leaf.content:
        return np.array(int(leaf.content.decode()), dtype=object)
    array = attempt.array(leaf)
    return array.astype(object) if array is not None and array.dtype.kind in "iu" else None


def common_factor(moves: Sequence[Sequence[np.ndarray]]) -> float | None:
    """Return the ratio of the changes in two runs if all leaves changed in the same direction, or None.

    Args:
        moves: for each leaf, the flat values before the update and after it in both runs.
    """
    if not moves or any(len({array.shape for array in each}) != 1 for each in moves):
        return None
    old, straight, resumed = (np.concatenate([each[place] for each in moves]) for place in range(3))
    expected, found = straight - old, resumed - old
    size = float(expected @ expected)
    if size == 0 or not np.isfinite(found).all() or not np.isfinite(size):
        return None
    factor = float(expected @ found) / size
    # Rounding of the state can change the direction of a small move, so allow for it.
    rounding = 4 * np.finfo(np.float32).eps * float(np.linalg.norm(old))
    is_same = np.linalg.norm(found - factor * expected) <= _SAME_DIRECTION * np.linalg.norm(found) + rounding
    return factor if is_same and abs(factor - 1) > _SAME_DIRECTION else None


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between an interrupted and an uninterrupted run.

    Attributes:
        kind: "start": the initial states. "restored": the restored state, compared with the state after the update that
            it was saved in. "label": the number of the update. "end": the last update.
        number: the number of the process of the interrupted run, from 0.
        step: the label of the update.
        position: the number of updates since the start of the process.
        name: the name of the leaf or metric, or the number of the batch in its update.
        straight, resumed: the leaf or batch in the uninterrupted and in the interrupted run; None: missing. An int is a
            number of batches or the number of an update.
        differing, of: the number of leaves or metrics that differ, and their total number.
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
    """Yield the differences between an interrupted and an uninterrupted run in the order in which they occur."""
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
    """Return the first difference of each kind, in the order in which they occur."""
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
    """Return the restored leaf in place of a saved scalar if both are the same number, as in an int and an array."""
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
    """Return what is wrong with the batches from a difference on, and how many are skipped or come twice."""
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
            offset = found.resumed - found.straight  # each start takes this many batches ahead
        return ("ahead" if offset > 0 else "behind"), abs(offset)
    if isinstance(found.straight, Batch) and isinstance(found.resumed, Batch):
        return _of_content(found.straight, found.resumed, expected), 0
    return "other", 0


def _batches(updates: Iterable[Update]) -> list[Batch]:
    return [batch for update in updates for batch in update.batches]


def _is_continued(expected: Sequence[Batch], place: int, taken: Sequence[Batch]) -> bool:
    """Return whether the taken batches equal the expected ones from a place on, up to the shorter of both."""
    return all(one.digest == other.digest for one, other in zip(expected[place:], taken, strict=False))


def _of_content(straight: Batch, resumed: Batch, expected: Sequence[Batch]) -> DataFault:
    known = {row for batch in expected for row in batch.rows}
    digests = {batch.digest for batch in expected}
    if resumed.digest in digests or (resumed.rows and known.intersection(resumed.rows)):
        return "order"
    common = straight.leaves.keys() & resumed.leaves.keys()
    return "parts" if any(straight.leaves[name].same(resumed.leaves[name]) for name in common) else "other"
