"""The content of the checkpoints that `tests/golden/make_orbax.py` wrote, and comparisons of it byte for byte."""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.pytree.flatten import EMPTY, flatten
from tests.support.same_trees import raw

STEP = 7
_IN_RUNS = {"manager": str(STEP), "items": str(STEP), "keys": str(STEP), "one-item": str(STEP)}
_IN_RUNS["flax"] = f"checkpoint_{STEP}"


def path_of(form: Path) -> Path:
    """Return the path of the checkpoint of a form."""
    return form / "saved" / _IN_RUNS.get(form.name, "")


def expected_items(form: Path) -> dict[str, Any]:
    """Return the saved items by name; JSON items are `jct.JsonValue`."""
    encoded = json.loads((form / "expected.json").read_text(encoding="utf-8"))
    return {name: _tree(item) for name, item in encoded.items()}


def _tree(encoded: Mapping[str, Any]) -> Any:
    ((kind, found),) = encoded.items()
    match kind:
        case "dict":
            return {int(key) if key.isdigit() else key: _tree(child) for key, child in found.items()}
        case "list":
            return [_tree(child) for child in found]
        case "tuple":
            return tuple(_tree(child) for child in found)
        case "namedtuple":
            return collections.namedtuple("Fields", found)(*map(_tree, found.values()))
        case "array":
            return _array(*found)
        case "bytes":
            return base64.b64decode(found)
        case "json":
            return jct.JsonValue(found)
        case _:
            return found


def _array(dtype: str, shape: list[int], is_jax: bool, data: str) -> Any:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    array = np.frombuffer(base64.b64decode(data), kind).reshape(shape)
    return jnp.asarray(array) if is_jax else array.copy()


def assert_item(found: Any, expected: Any, subject: str) -> None:
    """Fail unless an item that was loaded without a target has the saved leaves, byte for byte."""
    if isinstance(expected, jct.JsonValue):
        assert found == expected, subject
        return
    loaded, wanted = flatten(found), flatten(expected)
    leaves = dict(zip(loaded.names, loaded.leaves, strict=True))
    assert sorted(leaves) == sorted(wanted.names), subject
    for name, leaf in zip(wanted.names, wanted.leaves, strict=True):
        assert_leaf(leaves[name], leaf, f"{subject}: {name}")


def assert_leaf(found: Any, expected: Any, subject: str) -> None:
    """Fail unless two leaves are equal; a Python number may have become a numpy scalar, or the reverse."""
    if expected is EMPTY:
        assert found is EMPTY or found is None, subject  # a NamedTuple without fields is None to Orbax
        return
    if expected is None or isinstance(expected, str | bytes | bool):
        assert type(found) is type(expected), subject
        assert found == expected, subject
        return
    array = np.asarray(expected)
    assert (np.asarray(found).dtype, np.shape(found)) == (array.dtype, array.shape), subject
    assert raw(np.asarray(found)) == raw(array), subject


def blank(leaf: Any) -> Any:
    """A leaf of the same kind with other content, to load into."""
    if isinstance(leaf, jax.Array):
        return jnp.zeros_like(leaf)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return leaf if leaf is None else type(leaf)()
