"""The numbers in leaves of two runs, and how far, and in which direction, they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.records import Leaf

_SAME_DIRECTION = 0.02


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
