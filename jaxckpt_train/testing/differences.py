"""Compares the records of two runs: their starts, batches, metrics and states, and the numbers in differing leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.testing.processes import Attempt, Batch, Leaf, Leaves, Update

Kind = Literal["start", "restored", "label", "batch", "metric", "leaf", "end"]
DataFault = Literal["anew", "ahead", "behind", "other"]
"""Batches restart; are skipped; come twice; anything else."""


def relative_difference(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """Return the largest absolute difference divided by the largest absolute value, or inf if it is undefined."""
    if one is None or other is None or one.shape != other.shape or not one.size:
        return np.inf
    largest, difference = float(np.max(np.abs(one))), float(np.max(np.abs(one - other)))
    return difference / largest if largest > 0 and np.isfinite(difference) else np.inf


def numbers_of(leaf: Leaf) -> np.ndarray | None:
    """Return the data of a leaf; None: no numbers, or too many for a record.

    Integers become Python integers, which are exact; anything else becomes float64 or complex128.
    """
    if leaf.kind.startswith("python") and leaf.content:
        text = leaf.content.decode()
        match leaf.kind:
            case "python float":
                return np.asarray(float.fromhex(text))
            case "python int":
                return np.array(int(text), dtype=object)
            case "python complex":
                return np.asarray(complex(text))
            case "python bool":
                return np.asarray(float(text == "True"))
    dtype = np.dtype(np.uint32) if leaf.kind.startswith("key<") else DTYPES.get(leaf.kind)
    if dtype is None or len(leaf.content) != dtype.itemsize * math.prod(leaf.shape):
        return None
    array = np.frombuffer(leaf.content, dtype).reshape(leaf.shape)
    return array.astype({"i": object, "u": object, "c": np.complex128}.get(array.dtype.kind, np.float64))


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between an interrupted and an uninterrupted run."""

    # "start": the initial states. "restored": the restored state, compared with the state after the update that
    # it was saved in. "label": the number of the update. "end": the last update.
    kind: Kind
    number: int  # the number of the process of the interrupted run, from 0
    step: int  # the label of the update
    position: int  # the number of updates since the start of the process
    name: str = ""  # the name of the leaf or metric, or the number of the batch in its update
    # The leaf or batch in each run; None: missing. An int is a number of batches or the number of an update.
    straight: Leaf | Batch | int | None = None
    resumed: Leaf | Batch | int | None = None
    differing: int = 1  # the number of leaves or metrics that differ
    of: int = 1  # their total number


def first_differences(attempts: Sequence[Attempt], straight: Attempt) -> dict[Kind, Difference]:
    """Return the first difference of each kind, in the order in which they occur."""
    kinds: dict[Kind, Difference] = {}
    for difference in _differences(attempts, straight):
        kinds.setdefault(difference.kind, difference)
    return kinds


def _differences(attempts: Sequence[Attempt], straight: Attempt) -> Iterator[Difference]:
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
            if not (expected.elsewhere or update.elsewhere):
                yield from _of_batches(number, position, expected, update)
            yield from _of_leaves("metric", number, update.step, position, expected.metrics, update.metrics)
            yield from _of_leaves("leaf", number, update.step, position, expected.leaves, update.leaves)
        if number == len(attempts) - 1 and len(attempt.updates) < len(wanted):
            step = wanted[len(attempt.updates)].step
            yield Difference("end", number, step, len(attempt.updates) + 1, "", straight.last, attempt.last)


def _at_start(number: int, attempt: Attempt, straight: Attempt) -> Iterator[Difference]:
    step, found = attempt.resumed_at, attempt.starts[0].leaves
    if step is None:
        yield from _of_leaves("start", number, 0, 0, straight.starts[0].leaves, found)
    elif step == 0 or step in straight.by_step:
        expected = straight.by_step[step].leaves if step in straight.by_step else straight.starts[0].leaves
        restored = {name.partition("/")[0] for name in found}
        known = {
            name: found[name] if name in found and _is_same_number(found[name], leaf) else leaf
            for name, leaf in expected.items()
            if name.partition("/")[0] in restored
        }
        yield from _of_leaves("restored", number, step, 0, known, found)


def _is_same_number(restored: Leaf, saved: Leaf) -> bool:
    """Return whether scalars of different forms, such as an int and an array, are the same number."""
    if restored.shape or saved.shape or restored.kind == saved.kind:
        return False
    one, other = numbers_of(restored), numbers_of(saved)
    if one is None or other is None:
        return False
    return one.item() == other.item() or bool(one != one and other != other)


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
    differing = differing_names(straight, resumed)
    if differing:
        pair = straight.get(differing[0]), resumed.get(differing[0])
        count = len(straight.keys() | resumed.keys())
        yield Difference(kind, number, step, position, differing[0], *pair, len(differing), count)


def differing_names(straight: Leaves, resumed: Leaves) -> list[str]:
    """Return the names of the leaves that differ or that only one has."""
    names = [name for name, leaf in straight.items() if not leaf.same(resumed.get(name))]
    return names + [name for name in resumed if name not in straight]


def fault_of(found: Difference, attempts: Sequence[Attempt], straight: Attempt) -> tuple[DataFault, int]:
    """Return what is wrong with the batches from a difference on, and how many are skipped or come twice."""
    attempt = attempts[found.number]
    expected = _batches(straight.updates)
    taken = _batches(update for update in attempt.updates if update.step >= found.step)
    if not taken or not expected:
        return "other", 0
    before = len(_batches(update for update in straight.updates if update.step < found.step))
    at = [place for place in range(len(expected)) if _is_continued(expected[place:], taken)]
    if 0 in at and attempt.resumed_at is not None and before:
        return "anew", before
    if at:
        offset = min((place - before for place in at), key=abs)
        if offset == 0 and isinstance(found.straight, int) and isinstance(found.resumed, int):
            offset = found.resumed - found.straight  # each start takes this many batches ahead
        return ("ahead" if offset > 0 else "behind"), abs(offset)
    return "other", 0


def _batches(updates: Iterable[Update]) -> list[Batch]:
    return [batch for update in updates for batch in update.batches]


def _is_continued(expected: Sequence[Batch], taken: Sequence[Batch]) -> bool:
    """Return whether the taken batches equal the expected ones, up to the shorter of both."""
    return all(one.digest == other.digest for one, other in zip(expected, taken, strict=False))
