"""Saves and loads of a job while the caller's JAX settings are in effect: a mesh, or no jit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, sharding_of
from tests.support.jobs.counted_loads import Arrays, load_counted, save_alone
from tests.support.jobs.fixtures import JobOf

ARRAYS: Arrays = {"all": ([512, 1024], "float32"), "columns": ([1024, 512], "bfloat16"), "scalar": ([], "float32")}
SPECS: dict[str, list[Any]] = {"all": [], "columns": [None, "x"], "scalar": []}
SAVED: Arrays = {"all": ([2048, 1024], "int32"), "rows": ([1024, 512], "int32")}


def context_of(kind: str) -> contextlib.AbstractContextManager[Any]:
    match kind:
        case "explicit":
            return jax.set_mesh(jax.make_mesh((4,), ("p",), axis_types=(AxisType.Explicit,)))
        case "all":
            return jax.set_mesh(Mesh(np.array(jax.devices()), ("p",)))
        case "own":
            return jax.set_mesh(Mesh(np.array(jax.local_devices()), ("p",)))
        case _:
            return jax.disable_jit()


def load_within(path: str, kind: str, read_once: bool) -> list[str]:
    with context_of(kind):
        wrong: list[str] = load_counted(path, [4], SPECS, ARRAYS, read_once)["wrong"]
    return wrong


@pytest.mark.parametrize("kind", ["explicit", "all", "own", "no jit"])
def test_job_loads_under_caller_settings(tmp_path: Path, job_of: JobOf, kind: str) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    assert job_of(4, 1).call(load_within, str(tmp_path / "c"), kind, True) == [[]] * 4


def load_made_by_all(path: str, kind: str) -> list[Any]:
    """Keys and weakly typed scalars over all devices: JAX makes these by programs."""
    everywhere = sharding_of([4], [])
    weak = jax.jit(lambda: jax.numpy.sin(2.0) * 1.0, out_shardings=everywhere)()
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=everywhere)
    with context_of(kind):
        loaded = jct.load(path, {"key": key, "weak": weak})
    assert all(loaded[name].sharding.is_equivalent_to(everywhere, 0) for name in loaded)
    data = jax.random.key_data(loaded["key"]).addressable_data(0)
    return [np.asarray(data).tolist(), float(loaded["weak"].addressable_data(0))]


@pytest.mark.parametrize("kind", ["explicit", "own", "no jit"])
def test_keys_and_weak_scalars_under_caller_settings(tmp_path: Path, job_of: JobOf, kind: str) -> None:
    key, weak = jax.random.key(7), jax.numpy.sin(2.0) * 1.0
    jct.save(tmp_path / "c", {"key": key, "weak": weak})
    wanted = [np.asarray(jax.random.key_data(key)).tolist(), float(weak)]
    assert job_of(4, 1).call(load_made_by_all, str(tmp_path / "c"), kind) == [wanted] * 4


def save_within(path: str, kind: str, more: dict[str, Any]) -> None:
    specs: dict[str, list[Any]] = {"all": [], "rows": ["x"]}
    tree = {name: global_array(shape, [4], specs[name], dtype) for name, (shape, dtype) in SAVED.items()}
    tree["floats"] = global_array([8], [4], [], "float32")
    with context_of(kind):
        jct.save(path, tree, settings=jct.StoreSettings(**more))


@pytest.mark.parametrize("kind", ["explicit", "all", "no jit"])
@pytest.mark.parametrize("more", [{"snapshot": "device"}, {"nonfinite": "reject"}], ids=["device", "reject"])
def test_job_saves_under_caller_settings(tmp_path: Path, job_of: JobOf, kind: str, more: dict[str, Any]) -> None:
    job_of(4, 1).call(save_within, str(tmp_path / "c"), kind, more)
    loaded = jct.load(tmp_path / "c")
    for name, (shape, dtype) in SAVED.items():
        assert loaded[name].tobytes() == np.arange(np.prod(shape), dtype=dtype).tobytes()
