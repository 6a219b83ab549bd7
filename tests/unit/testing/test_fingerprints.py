"""Digests of leaves and batches differ exactly where saved values would differ."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train.testing import recorder as fingerprints
from jaxckpt_train.testing.processes import Leaves


def leaves(value: Any) -> Leaves:
    return fingerprints.leaves_of({"state": value})


def same(first: Any, second: Any) -> bool:
    one, other = leaves(first), leaves(second)
    return list(one) == list(other) and all(one[name].same(other[name]) for name in one)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        jnp.arange(4, dtype=jnp.bfloat16),
        jax.random.key(3),
        np.float32(1.5),
        7,
        1.5,
        True,
        "text",
        b"bytes",
        None,
        {},
        [1, (2, None)],
        jct.JsonValue({"a": [1]}),
    ],
    ids=str,
)
def test_value_equals_itself(value: Any) -> None:
    assert same(value, value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(3), np.array([0.0, -0.0, 0.0])),
        (np.full(100, 1.0), np.full(100, np.nextafter(1.0, 2.0))),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
        (1, 1.0),
        (1, True),
        (0.1, 0.1 + 2**-56),
        ("a", b"a"),
        ({"a": 1}, {"b": 1}),
        (None, {}),
        ([1, 2], [1]),
        (jct.JsonValue({"a": 1}), jct.JsonValue({"a": 2})),
    ],
)
def test_values_that_a_save_distinguishes_differ(first: Any, second: Any) -> None:
    assert not same(first, second)


def test_nan_equals_itself() -> None:
    assert same(np.array([np.nan]), np.array([np.nan]))


def test_paths_match_those_of_a_save() -> None:
    found = leaves({"params": [np.zeros((2, 3), np.float32)], "step": 4})
    assert {name: leaf.form() for name, leaf in found.items()} == {
        "state/params/0": "float32[2,3]",
        "state/step": "python int",
    }


def test_the_variables_of_nnx_objects_are_leaves() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    before = leaves(model)
    assert {name: leaf.form() for name, leaf in before.items()} == {
        "state/bias": "float32[3]",
        "state/kernel": "float32[2,3]",
    }
    model.bias[...] = jnp.ones(3)
    assert [name for name, leaf in leaves(model).items() if not leaf.same(before[name])] == ["state/bias"]


def test_the_state_can_still_be_donated() -> None:
    state = {"w": jnp.arange(100_000.0)}
    leaves(state)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(state)
    assert state["w"].is_deleted()


class OwnFiles:
    """A checkpointable that writes its own files."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            folder: Path = await directory.await_creation()
            (folder / "a.bin").write_bytes(self.content)

        return write()

    async def load(self, directory: Path) -> None:
        raise NotImplementedError


def test_files_of_objects_are_compared_by_content() -> None:
    assert list(leaves(OwnFiles(b"1"))) == ["state/a.bin"]
    assert same(OwnFiles(b"1"), OwnFiles(b"1"))
    assert not same(OwnFiles(b"1"), OwnFiles(b"2"))


def test_only_small_values_stay_in_the_record() -> None:
    small, large = np.arange(8.0), np.arange(9, dtype=np.int64)
    found = leaves([small, large])
    assert found["state/0"].content == small.tobytes()
    assert found["state/1"].content == b""


def test_metrics_keep_their_order_and_exact_values() -> None:
    found = fingerprints.metrics_of({"loss": jnp.float32(0.1), "accuracy": 0.5, "parts": {"b": 1}})
    assert list(found) == ["loss", "accuracy", "parts/b"]
    assert found["loss"].content == np.float32(0.1).tobytes()
    assert float.fromhex(found["accuracy"].content.decode()) == 0.5
    assert fingerprints.metrics_of(None) == {}


def test_batches_differ_by_names_and_order() -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.arange(4)
    batch = fingerprints.batch_of({"x": x, "y": y})
    turned = fingerprints.batch_of({"x": x[::-1], "y": y[::-1]})
    assert batch.digest != turned.digest
    assert batch.digest == fingerprints.batch_of({"x": x.copy(), "y": y.copy()}).digest
    assert batch.digest != fingerprints.batch_of({"x": x, "z": y}).digest


@dataclasses.dataclass
class Example:
    """A batch that is not a pytree."""

    x: Any
    text: Any = None


def test_records_and_object_arrays_are_compared_by_content() -> None:
    one = fingerprints.batch_of(Example(np.zeros(3), np.array(["a", "b"], object)))
    assert one.digest == fingerprints.batch_of(Example(np.zeros(3), np.array(["a", "b"], object))).digest
    assert one.digest != fingerprints.batch_of(Example(np.ones(3), np.array(["a", "b"], object))).digest
    assert one.digest != fingerprints.batch_of(Example(np.zeros(3), np.array(["a", "c"], object))).digest
    assert one.opaque_leaf() is None
    assert fingerprints.batch_of([1, Example(object())]).opaque_leaf() == "batch/1/x, an object builtins.object"
    itself = Example(None)
    itself.x = itself
    assert "Example" in (fingerprints.batch_of(itself).opaque_leaf() or "")


def test_unknown_objects_are_compared_by_type() -> None:
    one, other = fingerprints.batch_of([object(), 1]), fingerprints.batch_of([object(), 1])
    assert one.digest == other.digest
    assert one.digest != fingerprints.batch_of([object(), 2]).digest
    unsorted = fingerprints.batch_of({("a", ("b",)): 1})  # a key that cannot become a path
    assert unsorted.leaves["batch"].kind == "object builtins.dict"


def test_use_of_global_generators_is_detected() -> None:
    python, numpy = random.getstate(), np.random.get_state()
    before = fingerprints.host_random()
    assert fingerprints.host_random() == before
    random.random()
    after = fingerprints.host_random()
    assert (after["random"] != before["random"], after["np.random"] == before["np.random"]) == (True, True)
    np.random.normal()
    assert fingerprints.host_random()["np.random"] != before["np.random"]
    random.setstate(python)
    np.random.set_state(numpy)
    assert fingerprints.host_random() == before
