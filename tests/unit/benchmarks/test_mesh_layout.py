"""Mesh layouts computed from geometry: equal to those that the package finds with JAX's index maps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.mesh_layout import Cuts, MeshLayout, PlannedSharding
from jaxckpt_train.pytree.partition import held_boxes

AXES = ("data", "fsdp", "model")
CUTS: list[Cuts] = [
    ((), (), ()),
    ((), ("fsdp",), ()),
    (("fsdp", "model"), ("data",), ()),
    (("model", "data"), (), ("fsdp",)),
]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("devices_of_a_process", [1, 2, 4])
def test_layouts_are_those_of_jax(cuts: Cuts, devices_of_a_process: int) -> None:
    devices = np.random.default_rng(0).permutation(np.array(jax.devices()[:8])).reshape(2, 2, 2)
    sharding, shape = NamedSharding(Mesh(devices, AXES), PartitionSpec(*(axes or None for axes in cuts))), (16, 8, 4)
    expected = held_boxes(sharding, shape, lambda device: device.id // devices_of_a_process)
    numbers = np.array([device.id // devices_of_a_process for device in devices.flat]).reshape(2, 2, 2)
    for process in range(8 // devices_of_a_process):
        mine = [held for held in expected if process in held.holders]
        assert MeshLayout(numbers, AXES, process).held(cuts, shape) == mine
        planned: Any = PlannedSharding(numbers, AXES, cuts, shape, process)
        assert held_boxes(planned, shape, lambda device: device.process_index) == mine
