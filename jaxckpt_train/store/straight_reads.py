"""Finds what can be read straight to where it is wanted, without a copy: it lies there as it does in the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxckpt_train.store.boxes import box_elements, element_span, is_contiguous_within
from jaxckpt_train.store.read_plan import Run, Wanted
from jaxckpt_train.store.segment import ALIGNMENT


def straight_target(run: Run, wanted: Sequence[Wanted]) -> np.ndarray | None:
    """The part of a target that is just what a run reads, and where it can be read to; None: it has to be copied.

    It is one row-major piece of the chunk and of the target, and whole pages of both: nothing else is read, and nothing
    else overwritten.
    """
    if len(run.reads) != 1 or len(run.reads[0].uses) != 1:
        return None
    (use,), chunk = run.reads[0].uses, run.reads[0].chunk
    target, box = wanted[use.wanted].target, wanted[use.wanted].boxes[use.box]
    if target is None or not (is_contiguous_within(use.common, chunk.box) and is_contiguous_within(use.common, box)):
        return None
    itemsize = chunk.length // box_elements(chunk.box)
    first, last = (chunk.offset + element * itemsize for element in element_span(use.common, chunk.box))
    at = element_span(use.common, box)[0] * itemsize
    if (run.start, run.stop) != (first, last) or (target.ctypes.data + at) % ALIGNMENT:
        return None
    return target[at : at + last - first]
