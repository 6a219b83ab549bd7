"""States of jobs that are only planned: how many arrays of which shapes, cut over how many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.mesh_layout import Cuts

ITEM_BYTES = 4
GROUP = 64
"""How many processes at most hold one replica in layout "hsdp"."""
TENSOR = 8
"""Over how many processes the second axis is cut in layout "fsdp-tp"."""
# The long axis of arrays: 2^9 x 125, which most numbers of processes divide that are measured, or 2^5 x 3,125.
LENGTH, OTHER_LENGTH = 64_000, 100_000


def shapes(length: int) -> Sequence[tuple[int, ...]]:
    """What one layer has; no number of processes divides the last two, so every process has them."""
    return (
        (length, 512),
        (512, length),
        (length, 8, 64),
        (length, 512),
        (length, 1024),
        (1024, length),
        (2 * length, 256),
        (length,),
        (4095,),
        (33,),
    )


LAYOUTS = ("fsdp", "fsdp-tp", "hsdp", "replicated")


class PlannedArray(NamedTuple):
    """One array: its name, its shape, and how the mesh cuts it."""

    name: str
    shape: tuple[int, ...]
    cuts: Cuts


@dataclass(frozen=True)
class PlannedState:
    """The arrays of a job, and its mesh: the number of the process of each device, one device a process."""

    mesh: np.ndarray
    axes: tuple[str, ...]
    arrays: list[PlannedArray]


def planned_state(layout: str, processes: int, arrays: int) -> PlannedState:
    """A state in one of `LAYOUTS`, whose size does not depend on the number of processes.

    - "fsdp": each array is cut over all processes along the first axis that they divide; those without one are on all.
    - "fsdp-tp": as "fsdp" over an eighth of the processes, and along another axis, where there is one, over 8.
    - "hsdp": as "fsdp" over groups of about 64 processes, each of which holds all.
    - "replicated": every process holds all.
    """
    length = LENGTH if LENGTH % processes == 0 or processes % LENGTH == 0 else OTHER_LENGTH
    group = next(size for size in range(min(GROUP, processes), 0, -1) if processes % size == length % size == 0)
    axes, sizes = {
        "fsdp": (("fsdp",), (processes,)),
        "fsdp-tp": (("fsdp", "tensor"), (processes // TENSOR, TENSOR)),
        "hsdp": (("replica", "fsdp"), (processes // group, group)),
        "replicated": (("replica",), (processes,)),
    }[layout]
    extent = dict(zip(axes, sizes, strict=True))
    named = []
    for number in range(arrays):
        shape = shapes(length)[number % len(shapes(length))]
        named.append(PlannedArray(f"params/layer_{number:05d}/kernel", shape, _cuts(shape, extent)))
    return PlannedState(np.arange(processes).reshape(sizes), axes, named)


def _cuts(shape: tuple[int, ...], extent: dict[str, int]) -> Cuts:
    cuts: list[tuple[str, ...]] = [() for _ in shape]
    for axis in ("fsdp", "tensor"):
        if axis in extent:
            free = (n for n, size in enumerate(shape) if not cuts[n] and size % extent[axis] == 0)
            if (number := next(free, None)) is not None:
                cuts[number] = (axis,)
    return tuple(cuts)
