"""What tells two values apart: of each leaf its dtype, shape and a digest of its bytes."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
import xxhash

from jaxckpt_train.checkpointables.contract import NOTHING
from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.store.digests import digest_function
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.json_values import encode_value
from jaxckpt_train.testing.record_files import digests_of_files
from jaxckpt_train.testing.records import OBJECT, SMALL_BYTES, Batch, Leaf, Leaves
from jaxckpt_train.tree.flatten import EMPTY, flatten
from jaxckpt_train.tree.leaf_values import is_key_array
from jaxckpt_train.tree.paths import ROOT, join

MOST_ROWS = 1024
MOST_DEEP = 20  # of records within records
Keep = Callable[[Leaf, Callable[[], bytes], int], Leaf]
"""Keeps the bytes of a leaf somewhere, and says where in the leaf that it returns."""
_digest = digest_function("xxh3-128")
_PYTHON = (bool, int, float, complex, str, bytes)


def leaves_of(checkpointables: Mapping[str, Any], keep: Keep) -> Leaves:
    """The leaves of some checkpointables as a save would take them; a path begins with the checkpointable's name."""
    found: Leaves = {}
    for name, value in checkpointables.items():
        staged = handler_of(value).stage(value)
        if staged.write_files is not None:
            files = digests_of_files(staged.write_files)
            found |= {f"{name}/{path}": Leaf("file", (), digest.decode()) for path, digest in files.items()}
        elif staged.tree is NOTHING:
            content = encode_value(staged.value)
            found[name] = _small(Leaf("JSON", (len(content),), _digest(content)), content)
        else:
            found |= _tree_leaves(name, staged.tree, keep)
    return found


def metrics_of(metrics: Mapping[str, Any] | None) -> Leaves:
    """What a loop has told of an update beside its state, in the order in which it did."""
    found: Leaves = {}
    for name, value in (metrics or {}).items():
        found |= _tree_leaves(str(name), value, kept_nowhere)
    return found


def batch_of(batch: Any) -> Batch:
    """An element of the data."""
    arrays: list[np.ndarray] = []
    leaves = _tree_leaves("batch", batch, kept_nowhere, arrays)
    whole = msgspec.json.encode([(name, leaf.kind, leaf.shape, leaf.digest) for name, leaf in leaves.items()])
    return Batch(_digest(whole), leaves, _rows(arrays))


def host_random() -> dict[str, str]:
    """Digests of the states of the global random generators of Python and numpy."""
    found = {"random": _digest(repr(random.getstate()).encode())}
    if "numpy.random" in sys.modules:
        state: Any = np.random.get_state(legacy=False)
        found["np.random"] = _digest(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)))
    return found


def _tree_leaves(name: str, tree: Any, keep: Keep, arrays: list[np.ndarray] | None = None, depth: int = 0) -> Leaves:
    try:
        flat = flatten(tree)
    except UnsupportedLeafError:  # only of data and metrics: a state like this cannot be saved
        return {name: _unknown(tree)}
    found: Leaves = {}
    for path, value in zip(flat.names, flat.leaves, strict=True):
        array = _host_array(value)
        full = name if path == ROOT else join(name, path)
        content = _content_of(value) if array is None and depth < MOST_DEEP else None
        if content is not None:
            found |= _tree_leaves(full, content, keep, arrays, depth + 1)
            continue
        found[full] = _python_leaf(value) if array is None else _array_leaf(value, array, keep)
        if arrays is not None and array is not None:
            arrays.append(array)
    return found


def _content_of(value: Any) -> Any:
    """What a record of fields, or an array of objects, holds, as of data and metrics; None: it is neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else None


def _host_array(value: Any) -> np.ndarray | None:
    """The data of an array, or of PRNG keys; None: it is none, or one of objects."""
    if value is None or value is EMPTY or type(value) in _PYTHON:
        return None
    if is_key_array(value):
        value = jax.random.key_data(value)
    array = np.asarray(jax.device_get(value) if isinstance(value, jax.Array) else value)
    return None if array.dtype.hasobject else array


def _array_leaf(value: Any, array: np.ndarray, keep: Keep) -> Leaf:
    kind = f"key<{jax.random.key_impl(value)}>" if is_key_array(value) else dtype_name(array.dtype)
    content = np.ascontiguousarray(array)
    leaf = Leaf(kind, array.shape, _digest(memoryview(content.reshape(-1).view(np.uint8)) if content.size else b""))
    if array.nbytes <= SMALL_BYTES:
        return _small(leaf, content.tobytes())
    return keep(leaf, content.tobytes, array.nbytes)


def _python_leaf(value: Any) -> Leaf:
    if value is None or value is EMPTY:
        return Leaf("none" if value is None else "empty", (), "")
    if type(value) not in _PYTHON:
        return _unknown(value)
    content = (value.hex() if type(value) is float else repr(value)).encode(errors="backslashreplace")
    return _small(Leaf(f"python {type(value).__name__}", (), _digest(content)), content)


def _small(leaf: Leaf, content: bytes) -> Leaf:
    return msgspec.structs.replace(leaf, content=content) if len(content) <= SMALL_BYTES else leaf


def _unknown(value: Any) -> Leaf:
    """Something of which only the type can be compared: its text may have an address in it."""
    return Leaf(f"{OBJECT}{type(value).__module__}.{type(value).__qualname__}", (), "")


def kept_nowhere(leaf: Leaf, data: Callable[[], bytes], nbytes: int) -> Leaf:
    """Keep the digest alone."""
    return leaf


def _rows(arrays: Sequence[np.ndarray]) -> tuple[str, ...]:
    """A digest for each example of a batch: of the same row of all its arrays."""
    lengths = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(lengths) != 1 or not 0 < max(lengths) <= MOST_ROWS:
        return ()
    hashes = [xxhash.xxh3_64() for _ in range(max(lengths))]
    for array in arrays:
        for row, digest in zip(array, hashes, strict=True):
            digest.update(np.ascontiguousarray(row).tobytes())
    return tuple(digest.hexdigest() for digest in hashes)
