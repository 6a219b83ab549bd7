"""What becomes of the boxes of one load as they come, from the disk or from other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.store.read_budget import ReadBudget
from jaxckpt_train.store.reading import ReadBox
from jaxckpt_train.tree.conversion import converted
from jaxckpt_train.tree.device_put import DevicePuts, weakly_typed
from jaxckpt_train.tree.flatten import PLACEHOLDER
from jaxckpt_train.tree.host_values import spans_processes, value_of
from jaxckpt_train.tree.placement import Placement
from jaxckpt_train.tree.target import Want


class Destination(NamedTuple):
    """Where one array goes.

    Attributes:
        number: of its value.
        name: for messages.
        want: what it becomes.
        placement: which boxes of it, and on which devices.
        dtype: as it is stored.
        leaves_host: whether it goes to an accelerator.
        donatable: as of `DevicePuts.put`.
    """

    number: int
    name: str
    want: Want
    placement: Placement
    dtype: np.dtype
    leaves_host: bool
    donatable: bool


class Arrivals:
    """Puts each box where it goes.

    Args:
        destinations: of all arrays, by their numbers in the load.
        values: what is made of them.
        budget: in which arrays on their way to accelerators count.
    """

    def __init__(self, destinations: Sequence[Destination], values: list[Any], budget: ReadBudget) -> None:
        self._destinations, self._values, self._budget = destinations, values, budget
        self._puts = DevicePuts()
        self._late = dict[int, tuple[Destination, np.ndarray]]()
        for each in destinations:
            if not each.placement.boxes:  # all of it lies on devices of other processes
                dtype = each.dtype if each.want.dtype is None else each.want.dtype
                values[each.number] = _typed(each, self._puts.none_here(each.placement, dtype))

    def take(self, read: ReadBox) -> None:
        """One box; whoever gives it lets go of its memory."""
        wanted, box, data = read
        each = self._destinations[wanted]
        if each.want.dtype is not None and each.want.dtype != data.dtype:
            data = converted(each.name, data, each.want.dtype)
            if each.leaves_host:
                self._budget.charge(data)  # until the device has it
        if each.want.form == "jax":
            array = self._puts.put(wanted, each.placement, box, data, donatable=each.donatable)
            self._values[each.number] = PLACEHOLDER if array is None else _typed(each, array)
        elif spans_processes(each.want.sharding):
            self._late[each.number] = each, data
        else:
            self._values[each.number] = value_of(each.name, each.want, data)

    def finish(self) -> None:
        """What is made by all processes, in the order that is the same in all of them."""
        for number in sorted(self._late):
            each, data = self._late.pop(number)
            self._values[number] = value_of(each.name, each.want, data)


def _typed(each: Destination, array: jax.Array) -> jax.Array:
    return weakly_typed(each.name, array) if each.want.weak else array
