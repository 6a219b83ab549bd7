"""What each process of a job needs of an array, as its sharding says: the same answer in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, full_box
from jaxckpt_train.store.read_repeats import Needs


class JobNeeds:
    """Answers for one array after the other; most have their shape and sharding in common with others.

    Args:
        processes: of the job.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._known: dict[object, Needs] = {}

    def of(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Needs:
        """Of each process its distinct boxes."""
        found = self._known.get((shape, sharding))
        if found is None:
            boxes: list[set[Box]] = [set() for _ in range(self._processes)]
            places: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in places.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                if box_elements(box):
                    boxes[device.process_index].add(box)
            found = self._known[shape, sharding] = tuple(tuple(sorted(each)) for each in boxes)
        return found


def holds_nearly_all(needs: Needs, elements: int) -> bool:
    """Whether the processes need more than half of an array on average."""
    needed = sum(box_elements(box) for boxes in needs for box in boxes)
    return 2 * needed > len(needs) * elements


def in_order_of_needs(needs: Needs) -> list[int]:
    """The processes by the first box of each, so that who reads a part often needs that part."""
    return sorted(range(len(needs)), key=lambda process: (not needs[process], needs[process][:1], process))
