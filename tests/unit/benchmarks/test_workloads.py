"""The workloads: real shapes, documented sizes, the same bytes for the same seed."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from benchmarks import arrays, random_bytes
from benchmarks.llama import Model, parameter_shapes, training_state
from benchmarks.workloads import Workload, workloads
from tests.support.fake_subjects import TINY

GIB = 1 << 30
LLAMA_PARAMETERS = 8_030_261_248  # as published


def test_llama_shapes_match_the_published_model() -> None:
    shapes = parameter_shapes(Model())
    layer = {path[1:]: shape for path, shape in shapes.items() if path[0] == "layer_31"}
    assert layer == {
        ("attention", "q"): (4096, 4096),
        ("attention", "k"): (4096, 1024),
        ("attention", "v"): (4096, 1024),
        ("attention", "o"): (4096, 4096),
        ("mlp", "gate"): (4096, 14336),
        ("mlp", "up"): (4096, 14336),
        ("mlp", "down"): (14336, 4096),
        ("norm", "attention"): (4096,),
        ("norm", "mlp"): (4096,),
    }
    assert shapes["embed", "embedding"] == (128256, 4096)
    assert shapes["lm_head", "kernel"] == (4096, 128256)
    assert sum(math.prod(shape) for shape in shapes.values()) == LLAMA_PARAMETERS


def test_stacked_layers_are_the_same_parameters() -> None:
    stacked = parameter_shapes(Model(), stacked=True)
    assert stacked["layers", "mlp", "gate"] == (32, 4096, 14336)
    assert sum(math.prod(shape) for shape in stacked.values()) == LLAMA_PARAMETERS


def test_scaled_model_keeps_size_of_head() -> None:
    small = Model().scaled(width=4, layers=16)
    assert small == Model(1024, 3584, 16, 8, 2, 32064)
    assert small.head == Model().head == 128
    state = training_state(small)
    dtypes = {leaf.path[1]: leaf.dtype for leaf in state if leaf.path[0] == "opt_state"}
    assert dtypes == {"count": "int32", "mu": "float32", "nu": "float32"}
    assert {leaf.dtype for leaf in state if leaf.path[0] == "params"} == {"bfloat16"}


def test_workload_sizes_are_as_documented() -> None:
    made = workloads(quick=False)
    assert made["dense"].nbytes == GIB
    assert 2 * GIB < made["llama"].nbytes == made["llama_stacked"].nbytes < 3 * GIB
    assert [len(made[name].leaves) for name in ("small", "small_10k", "moe")] == [1000, 10_000, 2000]
    assert min(leaf.nbytes for leaf in made["moe"].leaves) >= 256 << 10
    assert made["sharded"].nbytes == pytest.approx(GIB / 2, rel=0.05)


def test_partial_load_takes_the_first_leaves() -> None:
    partial = workloads(quick=True)["partial"]
    requested = partial.wanted("params")
    assert partial.leaves[: len(requested)] == requested
    assert {leaf.path[0] for leaf in partial.leaves[len(requested) :]} == {"opt_state"}


def test_workload_survives_json() -> None:
    for workload in workloads(quick=True).values():
        assert Workload.from_json(json.loads(json.dumps(dataclasses.asdict(workload)))) == workload


def test_leaf_bytes_depend_on_seed_and_leaf() -> None:
    first = random_bytes.leaf_bytes((1, 2), 0, 1001)
    assert first.dtype == np.uint8
    assert first.size == 1001
    assert np.array_equal(first, random_bytes.leaf_bytes((1, 2), 0, 1001))
    assert not np.array_equal(first, random_bytes.leaf_bytes((1, 3), 0, 1001))
    assert not np.array_equal(first, random_bytes.leaf_bytes((1, 2), 1, 1001))


def test_every_kind_of_difference_is_found() -> None:
    library = arrays.arrays_for("jax")
    sharded = workloads(quick=True)["sharded"]
    small = dataclasses.replace(sharded, leaves=sharded.leaves[:1])
    loaded = library.make(small, (1,))
    arrays.check(library, loaded, small, (1,), "whole")
    with pytest.raises(ValueError, match="with sharding"):
        arrays.check(library, loaded, small, (1,), "8x1")
    with pytest.raises(ValueError, match="bytes differ"):
        arrays.check(library, loaded, small, (2,), "whole")
    host = jax.tree.map(np.asarray, loaded)
    with pytest.raises(ValueError, match="loaded a ndarray"):
        arrays.check(library, host, small, (1,), "whole")


def test_a_wrong_dtype_is_found() -> None:
    library = arrays.arrays_for("jax")
    loaded = jax.tree.map(lambda array: array.astype("float16"), library.make(TINY, (1,)))
    with pytest.raises(ValueError, match=r"leaf params/a: loaded float16"):
        arrays.check(library, loaded, TINY, (1,), "whole")
