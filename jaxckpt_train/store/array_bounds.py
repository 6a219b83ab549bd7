"""Which shapes an array can have: those that a manifest holds, and that numpy and JAX can count with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxckpt_train.store.segment import MAX_DIMENSIONS

LIMIT = 1 << 62
_LARGEST_EMPTY = (1 << 63) - 1  # numpy makes no array, JAX ends the process, where all but the zeros come to more bytes


def array_bytes(shape: Sequence[int], itemsize: int) -> int | None:
    """How many bytes an array of this shape has; None: there can be none such."""
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) < LIMIT)):
        return None
    total = math.prod(shape) * itemsize
    if total == 0 and math.prod(size for size in shape if size) * itemsize > _LARGEST_EMPTY:
        return None
    return total if total < LIMIT else None
