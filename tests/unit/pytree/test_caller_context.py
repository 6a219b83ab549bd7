"""Saves within a mesh that the loop has set: of arrays that lie elsewhere, and of other meshes."""

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
def test_arrays_are_loaded_where_transfers_unasked_for_are_refused(tmp_path: Path, donatable: bool | None) -> None:
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
    for each in found:  # which copies them to the host
        assert_same(each, tree)


def model() -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(["get_mesh"], id="as-jax-0.8.0"),
        pytest.param(["get_mesh", "enable_x64"], id="as-jax-0.7.1"),
        pytest.param(["get_mesh", "enable_x64", "set_mesh"], id="as-jax-0.7.0"),
    ],
)
def test_names_that_jax_has_elsewhere_are_found(gone: list[str], run_python) -> None:
    program = """
import sys

import jax
import jax.experimental

if hasattr(jax, "enable_x64"):
    jax.experimental.enable_x64 = jax.enable_x64
if hasattr(jax, "set_mesh"):
    jax.sharding.use_mesh = jax.set_mesh
for name in sys.argv[1:]:
    vars(jax).pop(name, None)
    vars(jax.sharding).pop(name, None)

import jaxckpt_train
from jaxckpt_train.pytree import _jax as caller_context

mesh = jax.make_mesh((1,), ("x",))
with caller_context.set_mesh(mesh), caller_context.enable_x64(True):
    print(caller_context.get_mesh() == mesh, jax.numpy.arange(2.0).dtype)
    with caller_context.without_caller_settings():
        print(caller_context.get_mesh().empty)
print(caller_context.get_mesh().empty, jax.numpy.arange(2.0).dtype)
"""
    done = run_python(program, *gone, check=True, fresh=True)
    assert done.stdout.splitlines() == ["True float64", "True", "True float32"]
