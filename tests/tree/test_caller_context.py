"""Saves within a mesh that the loop has set: of arrays that lie elsewhere, and of other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt_train as jct
from jaxckpt_train.tree.caller_context import set_mesh


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "more",
    [{}, {"snapshot": "host"}, {"snapshot": "device"}, {"nonfinite": "reject"}],
    ids=["auto", "host", "device", "reject"],
)
def test_arrays_of_any_devices_and_meshes_are_saved(tmp_path: Path, number: int, more: dict[str, Any]) -> None:
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    automatic = Mesh(np.array(jax.devices()), ("x",))
    explicit = jax.make_mesh((8,), ("y",), axis_types=(AxisType.Explicit,))
    tree = {
        "automatic": jax.device_put(values, NamedSharding(automatic, P("x"))),
        "explicit": jax.device_put(values + 1, NamedSharding(explicit, P("y"))),
        "alone": jax.device_put(values + 2, jax.devices()[3]),
    }
    with set_mesh((automatic, explicit)[number]):
        jct.save(tmp_path / "c", tree, settings=jct.StoreSettings(**more))
    loaded = jct.load(tmp_path / "c")
    assert [loaded[name].tobytes() for name in tree] == [(values + n).tobytes() for n in range(3)]
