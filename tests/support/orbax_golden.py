"""What `tests/golden/make_orbax.py` wrote, and whether it is loaded: every byte, with and without a target."""

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
    """Where the checkpoint of a form lies."""
    return form / "saved" / _IN_RUNS.get(form.name, "")


def expected_items(form: Path) -> dict[str, Any]:
    """What was saved, by the names of items; JSON as `jct.JsonValue`."""
    told = json.loads((form / "expected.json").read_text(encoding="utf-8"))
    return {name: _tree(item) for name, item in told.items()}


def _tree(told: Mapping[str, Any]) -> Any:
    ((kind, found),) = told.items()
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
    """An item that was loaded without a target has the leaves of what was saved, byte for byte."""
    if isinstance(expected, jct.JsonValue):
        assert found == expected, subject
        return
    there, wanted = flatten(found), flatten(expected)
    leaves = dict(zip(there.names, there.leaves, strict=True))
    assert sorted(leaves) == sorted(wanted.names), subject
    for name, leaf in zip(wanted.names, wanted.leaves, strict=True):
        assert_leaf(leaves[name], leaf, f"{subject}: {name}")


def assert_leaf(found: Any, expected: Any, subject: str) -> None:
    """A number of Python's own may have become a scalar of numpy, or the other way round; nothing else changes."""
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
