"""The invariant of a round trip: the same structure, leaf types, and values byte for byte."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.leaves import EMPTY


def raw(leaf: Any) -> bytes:
    """Return the bytes of an array, key array or number."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(np.asarray(leaf)).tobytes()


def assert_same(found: Any, expected: Any, *, structure: bool = True) -> None:
    """Fail unless two trees are the same; `structure=False` compares their leaves by path alone."""
    if structure:
        assert jax.tree.structure(found) == jax.tree.structure(expected)
    left, right = flatten(found), flatten(expected)
    leaves = dict(zip(left.names, left.leaves, strict=True))
    assert sorted(leaves) == sorted(right.names)
    for name, leaf in zip(right.names, right.leaves, strict=True):
        assert_same_leaf(leaves[name], leaf, name)


def assert_same_leaf(a: Any, b: Any, name: str) -> None:
    """Fail unless two leaves are the same."""
    if isinstance(b, np.ndarray):
        assert isinstance(a, np.ndarray), name  # a memmap comes back as a plain array
    else:
        assert type(a) is type(b), name
    if b is None or b is EMPTY:
        return
    if isinstance(b, (bool, int, str, bytes)):
        assert a == b, name
        return
    if isinstance(b, (float, complex)):
        assert repr(a) == repr(b), name
        return
    assert (a.shape, a.dtype) == (b.shape, b.dtype), name
    assert raw(a) == raw(b), name
    if isinstance(b, jax.Array):
        assert (a.sharding, a.committed) == (b.sharding, b.committed), name
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), name
