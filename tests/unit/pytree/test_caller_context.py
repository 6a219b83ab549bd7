"""Saves and loads under the caller's mesh or transfer guard, of arrays on other devices or meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt_train as jct
from jaxckpt_train.pytree._jax import set_mesh
from tests.support.same_trees import assert_same


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


@pytest.mark.parametrize("donatable", [None, False])
def test_save_and_load_work_under_transfer_guard(tmp_path: Path, donatable: bool | None) -> None:
    cut = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    alike = {f"a{n}": jax.device_put(np.arange(n, n + 8.0, dtype=np.float32), cut) for n in range(3)}
    keys = {"key": jax.random.key(1), "raw": jax.random.PRNGKey(2)}
    tree = {
        **alike,
        **keys,
        "weak": jax.numpy.asarray(2.5),
        "weak too": jax.numpy.asarray(3.5),
        "model": nnx.state(model()),
    }
    with jax.transfer_guard("disallow"):
        jct.save(tmp_path / "c", tree)
        found = [jct.load(tmp_path / "c", tree, donatable=donatable)]
        assert jct.load(tmp_path / "c")["a1"].tolist() == [*range(1, 9)]
        for _ in range(2):
            with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
                found.append(ckpt.resume(tree))
                ckpt(tree)
    for each in found:  # outside the guard: the comparison copies the arrays to the host
        assert_same(each, tree)


def model() -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))
