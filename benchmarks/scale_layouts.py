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
# What one layer has, times 64,000 = 2^9 x 125, which all numbers of processes divide that are measured.
SHAPES: Sequence[tuple[int, ...]] = (
    (64_000, 512),
    (512, 64_000),
    (64_000, 8, 64),
    (64_000, 512),
    (64_000, 1024),
    (1024, 64_000),
    (128_000, 256),
    (64_000,),
    (4095,),  # no axis divides: every process has it
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
    group = next(size for size in range(min(GROUP, processes), 0, -1) if processes % size == SHAPES[0][0] % size == 0)
    axes, sizes = {
        "fsdp": (("fsdp",), (processes,)),
        "fsdp-tp": (("fsdp", "tensor"), (processes // TENSOR, TENSOR)),
        "hsdp": (("replica", "fsdp"), (processes // group, group)),
        "replicated": (("replica",), (processes,)),
    }[layout]
    extent = dict(zip(axes, sizes, strict=True))
    named = []
    for number in range(arrays):
        shape = SHAPES[number % len(SHAPES)]
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
