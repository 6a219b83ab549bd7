"""Random arrays saved by one job and loaded by another, between any meshes and numbers of processes."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxckpt_train as jct
from tests.support.jobs.arrays import Spec, holds, placed, sharding_of
from tests.support.jobs.fixtures import JobOf

DEVICES = {1: (8, 3, 1), 2: (4, 3, 1), 4: (2, 1)}  # devices of each process, for each number of processes
DTYPES = (
    "float32", "bfloat16", "int8", "bool", "float16", "uint32", "complex64", "float8_e4m3fn", "int4", "int16",
)  # fmt: skip
ARRAYS = 5  # arrays in each trial, each of another dtype
UNITS = (1, 2, 3, 5, 0, 7)  # rows of a part; where nothing is cut, sizes that no mesh divides
LARGE_BYTES = 6 << 20  # from 1 MiB a part on, replicas are written by several


@dataclasses.dataclass(frozen=True)
class Side:
    """A job, and a mesh of some or all of its devices, in any order."""

    processes: int
    devices: int
    mesh: list[int]
    order: list[int]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array, and its sharding in both jobs."""

    shape: list[int]
    dtype: str
    saved: Spec
    loaded: Spec


@dataclasses.dataclass(frozen=True)
class Resharding:
    """Arrays saved by one job and loaded by another; `by` says how the target is given."""

    saved: Side
    loaded: Side
    arrays: list[Array]
    by: str


@st.composite
def meshes(draw: st.DrawFn, size: int) -> list[int]:
    """One to three axes for a number of devices; an axis may have size 1."""
    mesh: list[int] = []
    for _ in range(draw(st.sampled_from([1, 2, 0]))):
        mesh.append(draw(st.sampled_from([axis for axis in range(1, size + 1) if size % axis == 0])))
        size //= mesh[-1]
    return [*mesh, size]


@st.composite
def sides(draw: st.DrawFn, processes: int, *, saves: bool) -> Side:
    devices = draw(st.sampled_from(DEVICES[processes]))
    order = draw(st.permutations(range(processes * devices)))
    used = order[: draw(st.sampled_from([len(order), len(order) - len(order) // 3, 1]))]
    if saves and len({place // devices for place in used}) == 1:
        used = order  # test_arrays_of_one_process.py has arrays that one process holds alone
    return Side(processes, devices, draw(meshes(len(used))), list(used))


@st.composite
def specs(draw: st.DrawFn, dimensions: int, axes: int) -> Spec:
    """Each axis cuts one dimension or none; a dimension may be cut by several, in any order."""
    parts: list[list[str]] = [[] for _ in range(dimensions)]
    for axis in draw(st.permutations("xyz"[:axes])):
        where = draw(st.sampled_from([*range(dimensions), None]))
        if where is not None:
            parts[where].append(axis)
    return [None if not part else part[0] if len(part) == 1 else part for part in parts]


@st.composite
def arrays(draw: st.DrawFn, dtype: str, saved: Side, loaded: Side) -> Array:
    dimensions = draw(st.sampled_from([2, 1, 3, 4, 0]))
    there, here = (draw(specs(dimensions, len(side.mesh))) for side in (saved, loaded))
    cuts = [math.lcm(_cut(a, saved.mesh), _cut(b, loaded.mesh)) for a, b in zip(there, here, strict=True)]
    shape = [cut * draw(st.sampled_from(UNITS)) for cut in cuts]
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if shape and nbytes and draw(st.sampled_from([False, False, True])):
        shape[draw(st.integers(0, dimensions - 1))] *= -(-LARGE_BYTES // nbytes)
    return Array(shape, dtype, there, here)


@st.composite
def reshardings(draw: st.DrawFn, savers: int, loaders: int) -> Resharding:
    saved, loaded = draw(sides(savers, saves=True)), draw(sides(loaders, saves=False))
    made = [draw(arrays(dtype, saved, loaded)) for dtype in draw(st.permutations(DTYPES))[:ARRAYS]]
    return Resharding(saved, loaded, made, draw(st.sampled_from(["target", "shardings"])))


def _cut(part: Any, mesh: list[int]) -> int:
    """Return the number of parts of a dimension."""
    return math.prod(mesh["xyz".index(axis)] for axis in (part or ()))


def values(array: dict[str, Any], number: int) -> np.ndarray:
    """Random bits, so that no two pieces are equal; for bool and int4, random values."""
    random, dtype = np.random.default_rng(number), np.dtype(array["dtype"])
    if array["dtype"] in ("bool", "int4"):
        return random.integers(0, 2 if array["dtype"] == "bool" else 8, array["shape"]).astype(dtype)
    size = math.prod(array["shape"])
    return np.frombuffer(random.bytes(size * dtype.itemsize), dtype).reshape(array["shape"])


def save_arrays(path: str, side: dict[str, Any], made: list[dict[str, Any]]) -> None:
    tree = {}
    for number, each in enumerate(made):
        tree[f"a{number}"] = placed(values(each, number), sharding_of(side["mesh"], each["saved"], side["order"]))
    jct.save(path, tree)


def load_arrays(path: str, side: dict[str, Any], made: list[dict[str, Any]], by: str) -> list[str]:
    """Load the arrays, and return the names of those that are wrong in this process."""
    places = {f"a{n}": sharding_of(side["mesh"], each["loaded"], side["order"]) for n, each in enumerate(made)}
    if by == "target":
        like = {
            name: jax.ShapeDtypeStruct(tuple(each["shape"]), np.dtype(each["dtype"]), sharding=place)
            for each, (name, place) in zip(made, places.items(), strict=True)
        }
        loaded = jct.load(path, like)
    else:
        loaded = jct.load(path, shardings=places)
    return [
        name
        for number, (each, (name, place)) in enumerate(zip(made, places.items(), strict=True))
        if loaded[name].sharding != place
        or len(loaded[name].addressable_shards) != len(place.addressable_devices)
        or not holds(loaded[name], values(each, number))
    ]


@pytest.mark.parametrize("loaders", [1, 2, 4])
@pytest.mark.parametrize("savers", [1, 2, 4])
@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.nightly)])
def test_any_sharding_to_any_other(job_of: JobOf, tmp_path: Path, savers: int, loaders: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(reshardings(savers, loaders))
    def one(given: Resharding) -> None:
        made = [dataclasses.asdict(array) for array in given.arrays]
        saving, loading = job_of(savers, given.saved.devices), job_of(loaders, given.loaded.devices)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            path = f"{folder}/c"
            saving.call(save_arrays, path, dataclasses.asdict(given.saved), made)
            found = loading.call(load_arrays, path, dataclasses.asdict(given.loaded), made, given.by)
            assert found == [[]] * loaders
            loaded = jct.load(path)
        wanted = {f"a{number}": values(each, number) for number, each in enumerate(made)}
        assert loaded.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
            assert loaded[name].tobytes() == value.tobytes(), name

    one()
