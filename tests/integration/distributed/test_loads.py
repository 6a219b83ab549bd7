"""Loads onto devices of several processes: each reads what it needs, on any mesh and number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import LOADED, SAVED, SHAPES, global_array, is_right, sharding_of, values_of
from tests.support.jobs.fixtures import JobOf


def save_arrays(path: str, mesh: list[int], specs: dict[str, list[Any]]) -> None:
    tree = {name: global_array(shape, mesh, specs[name], dtype) for name, (shape, dtype) in SHAPES.items()}
    jct.save(path, tree)


def load_arrays(path: str, mesh: list[int], specs: dict[str, list[Any]], by: str) -> list[str]:
    """Load the arrays, and return the names of those that are wrong in this process."""
    places = {name: sharding_of(mesh, specs[name]) for name in SHAPES}
    if by == "target":
        target = {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=places[name])
            for name, (shape, dtype) in SHAPES.items()
        }
        loaded = jct.load(path, target)
    else:
        loaded = jct.load(path, shardings=places)
    return [
        name
        for name, (shape, dtype) in SHAPES.items()
        if loaded[name].sharding != places[name] or not is_right(loaded[name], shape, dtype)
    ]


@pytest.mark.parametrize("by", ["target", "shardings"])
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(4, 1, [2, 2]), (4, 2, [4, 2]), (2, 4, [2, 4])])
def test_saved_by_four_loaded_by_others(
    tmp_path: Path, job_of: JobOf, processes: int, devices: int, mesh: list[int], by: str
) -> None:
    job_of(4, 2).call(save_arrays, str(tmp_path / "c"), [2, 4], SAVED)
    assert job_of(processes, devices).call(load_arrays, str(tmp_path / "c"), mesh, LOADED, by) == [[]] * processes


def test_saved_by_one_loaded_by_four(tmp_path: Path, job_of: JobOf) -> None:
    tree = {name: jnp.asarray(values_of(shape, dtype)) for name, (shape, dtype) in SHAPES.items()}
    jct.save(tmp_path / "one", tree)
    assert job_of(4, 1).call(load_arrays, str(tmp_path / "one"), [2, 2], LOADED, "target") == [[]] * 4


def load_special(path: str) -> list[str]:
    """Load keys and weak scalars over all processes, and an array on one process; return the problems."""
    everywhere, rows = sharding_of([4], []), sharding_of([4], ["x"])
    keys = jax.jit(lambda: jax.random.split(jax.random.key(5), 8), out_shardings=rows)()
    weak = jax.jit(lambda: jnp.sin(2.0) * 1.0, out_shardings=everywhere)()
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    tree = {"keys": keys, "key": jax.jit(lambda: jax.random.key(9), out_shardings=everywhere)(), "weak": weak}
    jct.save(path, tree | {"w": global_array([8], [4], ["x"])})
    target = {
        **{name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in tree.items()},
        "w": jax.ShapeDtypeStruct((8,), np.dtype("float32"), sharding=alone),
    }
    target["weak"] = weak
    loaded = jct.load(path, target)
    problems = []
    for name, leaf in tree.items():
        got = loaded[name]
        data = [jax.random.key_data(each) if name != "weak" else each for each in (got, leaf)]
        same = [
            np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
            for a, b in zip(data[0].addressable_shards, data[1].addressable_shards, strict=True)
        ]
        if got.sharding != leaf.sharding or got.dtype != leaf.dtype or not all(same):
            problems.append(f"{name}: {got.sharding} {got.dtype} {same}")
    if loaded["weak"].weak_type != weak.weak_type:
        problems.append("weak type")
    shards = loaded["w"].addressable_shards
    if len(shards) != (1 if jax.process_index() == 2 else 0):
        problems.append("shards of w")
    if shards and np.asarray(shards[0].data).tolist() != list(range(8)):
        problems.append("values of w")
    return problems


def test_keys_weak_scalars_and_arrays_of_one_process(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(4, 1).call(load_special, str(tmp_path / "c")) == [[]] * 4
