"""Restore targets of the Orbax-style manager: what to read for each leaf of a tree, and how to convert it."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.checkpoint_metadata import CheckpointableMetadata, LeafMetadata
from jaxckpt_train.checkpointables.handlers import PytreeHandler, handler_of
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pytree.flatten import PLACEHOLDER, flatten, unflatten
from jaxckpt_train.pytree.leaves import EMPTY

_log = logging.getLogger("jaxckpt_train")
_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The plan for one leaf of a restored tree."""

    target: Any  # of the load: an array, `jax.ShapeDtypeStruct`, plain value or PLACEHOLDER
    kind: type | None = None  # to convert the value to; None: keep its own, as for the dtype
    dtype: Any = None
    sharding: Any = None  # to put a host value on devices with; None: leave it where it is
    instead: Any = PLACEHOLDER  # the value of a leaf that is not read

    @property
    def needs_no_conversion(self) -> bool:
        """Whether the value that is read is the result."""
        return (self.kind, self.dtype, self.sharding) == (None, None, None) and self.instead is PLACEHOLDER


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a program requests for one leaf, by its target or its restore arguments; None: as it was saved."""

    kind: type | None = None
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    sharding: Any = None
    is_uncommitted: bool = False  # the array belongs on the default device, whatever sharding was saved


class TreeTarget:
    """The target of one tree: load `like`, then call `finished` to convert the loaded tree to the requested one.

    Args:
        item: the tree whose structure, and whose leaves if `leaves_count`, are the target; None: as it was saved.
        saved: the metadata of the saved tree; None: unknown.
        fallback: the sharding of leaves that have none and were saved with none.
        is_partial: whether to skip leaves of the checkpoint that are not in `item`.
    """

    def __init__(
        self,
        name: str,
        item: Any,
        saved: CheckpointableMetadata | None,
        *,
        restore_args: Any = None,
        fallback: jax.sharding.Sharding | None = None,
        leaves_count: bool = True,
        is_partial: bool = False,
    ) -> None:
        self._name, self._leaves = name, dict[str, _Leaf]()
        self._is_part = False
        self.like = self._tree = item
        if saved is None or saved.tree is None or not isinstance(handler_of(item), PytreeHandler):
            return
        try:
            requests = {} if restore_args is None else _by_path(restore_args)
            there = _by_path(saved.tree)
            given = there if item is None else _by_path(item)
        except TypeError as error:
            raise SettingsError(f"args of {name!r}: expected trees, found {error}") from error
        self._tree, self._is_part = saved.tree if item is None else item, is_partial and item is not None
        has_leaves = leaves_count and item is not None
        for path, leaf in given.items():
            request = _request_of_leaf(leaf) if has_leaves else _request_of_args(name, path, requests.get(path))
            found = saved.leaves.get(path)
            if found is not None:
                self._leaves[path] = _planned(leaf, there[path], found, request, fallback, leaves_count=has_leaves)
                continue
            self._leaves[path] = _absent(leaf, is_partial)
            has_subtree = path not in there and any(each.startswith(f"{path}/") for each in there)
            if has_subtree and (leaf is PLACEHOLDER or (self._is_part and leaf is not EMPTY)):
                raise SettingsError(f"args of {name!r}: {path}: expected a subtree as in the checkpoint, found a leaf")
        self.like = self._filled(saved.tree if self._is_part else self._tree)

    def _filled(self, tree: Any) -> Any:
        """Return the tree with the target of each leaf; the same object if its leaves are the targets already."""
        own, unread = _by_path(tree), _Leaf(PLACEHOLDER)
        targets = [leaf if leaf is EMPTY else self._leaves.get(path, unread).target for path, leaf in own.items()]
        is_same = all(one is other for one, other in zip(targets, own.values(), strict=True))
        return tree if is_same else unflatten(tree, targets)

    def finished(self, loaded: Any) -> Any:
        """Return the restored tree with the structure of `item`."""
        if not self._is_part and all(leaf.needs_no_conversion for leaf in self._leaves.values()):
            return loaded
        values = _by_path(loaded)
        changed = [
            f"{path} from {values[path].dtype} to {np.dtype(leaf.dtype)}"
            for path, leaf in self._leaves.items()
            if leaf.dtype is not None and getattr(values.get(path), "dtype", leaf.dtype) != leaf.dtype
        ]
        if changed:
            shown = ", ".join(changed[:3])
            _log.warning("%r: the dtype of %d leaves is converted: %s", self._name, len(changed), shown)
        done = [
            leaf if leaf is EMPTY else _finished(self._name, path, self._leaves[path], values.get(path, PLACEHOLDER))
            for path, leaf in _by_path(self._tree).items()
        ]
        return unflatten(self._tree, done)


def as_saved(saved: CheckpointableMetadata) -> Any:
    """Return the saved tree with a `jax.ShapeDtypeStruct` for each array and number, and other values as they are."""
    if saved.tree is None:
        return None
    leaves = flatten(saved.tree).leaves
    forms = [_struct((), np.asarray(leaf).dtype, None) if type(leaf) in _NUMBERS else leaf for leaf in leaves]
    return unflatten(saved.tree, forms)


def _by_path(tree: Any) -> dict[str, Any]:
    flat = flatten(tree)
    return dict(zip(flat.names, flat.leaves, strict=True))


def _absent(leaf: Any, is_partial: bool) -> _Leaf:
    """Return the plan for a leaf that the checkpoint lacks: a partial restore keeps it, any other load refuses it."""
    if is_partial:
        return _Leaf(PLACEHOLDER, instead=leaf)
    is_target = leaf is None or leaf is EMPTY or leaf is PLACEHOLDER or hasattr(leaf, "dtype")
    return _Leaf(leaf if is_target or type(leaf) in _NUMBERS or isinstance(leaf, str) else 0)


def _request_of_leaf(leaf: Any) -> _Request:
    """Return what a leaf of a target requests under `StandardRestore`."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _Request(np.ndarray, leaf.dtype, leaf.shape)
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return _Request(jax.Array, leaf.dtype, leaf.shape, sharding, is_uncommitted=not leaf.committed)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _Request(None, leaf.dtype, tuple(leaf.shape), getattr(leaf, "sharding", None))
    return _Request(type(leaf) if type(leaf) in _NUMBERS else None)


def _request_of_args(name: str, path: str, args: Any) -> _Request:
    """Return what the restore arguments of one leaf request."""
    kind = getattr(args, "restore_type", None)
    sharding: Any = getattr(args, "sharding", None)
    mesh, shape = getattr(args, "mesh", None), getattr(args, "global_shape", None)
    if sharding is None and mesh is not None:
        sharding = jax.sharding.NamedSharding(mesh, args.mesh_axes)
    if hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    if kind not in (None, np.ndarray, jax.Array, str, *_NUMBERS):
        raise SettingsError(
            f"args of {name!r}: restore_args of {path!r}: restore_type: expected np.ndarray, jax.Array, int, float, "
            f"str or None, found {kind!r}"
        )
    return _Request(kind, getattr(args, "dtype", None), None if shape is None else tuple(shape), sharding)


def _planned(
    leaf: Any, abstract: Any, found: LeafMetadata, request: _Request, fallback: Any, *, leaves_count: bool
) -> _Leaf:
    """Return the plan for a leaf of the target; `abstract` and `found` describe the saved leaf."""
    if leaf is PLACEHOLDER or leaf is EMPTY:
        return _Leaf(leaf)
    if leaf is None:
        return _Leaf(None) if abstract is None else _Leaf(PLACEHOLDER, instead=None)
    if found.shape is None:
        is_number = type(abstract) in _NUMBERS
        if leaves_count and (not is_number or request.kind in (np.ndarray, jax.Array)):
            return _Leaf(leaf)  # the load compares it with the saved value
        kind = None if request.kind is type(abstract) else request.kind
        return _Leaf(abstract, kind) if leaves_count else _Leaf(abstract, kind, request.dtype, request.sharding)
    if leaves_count and request.shape is None:
        return _Leaf(leaf)
    sharding = request.sharding
    if sharding is None and not request.is_uncommitted:
        sharding = _saved_sharding(found.sharding) or fallback
    if found.host is None:  # a PRNG key
        return _Leaf(leaf if leaves_count else _struct(abstract.shape, abstract.dtype, sharding))
    shape = abstract.shape if request.shape is None else request.shape
    dtype = None if request.dtype is None or np.dtype(request.dtype) == found.dtype else np.dtype(request.dtype)
    if request.kind not in (None, jax.Array) or (
        request.kind is None and request.sharding is None and found.host != "jax"
    ):
        is_scalar = found.host == "scalar" and request.kind is None
        kind = None if request.kind is np.ndarray else request.kind
        return _Leaf(np.zeros((), found.dtype)[()] if is_scalar else _on_host(shape, found.dtype), kind, dtype)
    if not _fits_jax(found.dtype):
        is_put = request.kind is jax.Array or request.sharding is not None
        return _Leaf(_on_host(shape, found.dtype), jax.Array if is_put else None, dtype, sharding if is_put else None)
    if leaves_count and dtype is None and (request.is_uncommitted or sharding is getattr(leaf, "sharding", None)):
        return _Leaf(leaf)
    return _Leaf(_struct(shape, found.dtype, sharding), dtype=dtype)


def _finished(name: str, path: str, leaf: _Leaf, value: Any) -> Any:
    """Convert a value that was read, as planned."""
    if value is PLACEHOLDER:
        return leaf.instead
    if leaf.kind not in (None, np.ndarray, jax.Array):
        if np.size(value) != 1 or np.ndim(value) != 0:
            raise SettingsError(
                f"args of {name!r}: {path!r}: expected a number to restore as {leaf.kind.__name__}, found an array of "
                f"shape {np.shape(value)}"
            )
        return leaf.kind(value)
    is_number = type(value) in _NUMBERS
    if leaf.dtype is not None:
        value = (np.asarray(value) if is_number else value).astype(leaf.dtype)
    if leaf.sharding is not None:
        host = np.asarray(value)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
        return jax.make_array_from_callback(host.shape, leaf.sharding, lambda index: host[index])
    if leaf.kind is np.ndarray:
        return np.asarray(value)
    if leaf.kind is jax.Array:
        return jnp.asarray(value)
    return value.item() if is_number and leaf.dtype is not None else value


def _saved_sharding(saved: Any) -> jax.sharding.Sharding | None:
    """Return the saved sharding over the first devices of this job; None: no sharding, or too few devices."""
    try:
        axes, spec = dict(saved["mesh"]), [tuple(axis) if isinstance(axis, list) else axis for axis in saved["spec"]]
    except (KeyError, TypeError, ValueError):  # the manifest may hold anything here: the text is for people
        return None
    count = math.prod(axes.values())
    if count > len(jax.devices()):
        return None
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    partition: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(mesh, partition(*spec))


def _struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape, dtype, sharding=sharding)


def _fits_jax(dtype: Any) -> bool:
    """Return whether JAX can hold the dtype: 64-bit types only if they are enabled."""
    dtypes: Any = jax.dtypes
    return bool(dtypes.issubdtype(dtype, dtypes.extended) or dtypes.canonicalize_dtype(dtype) == dtype)


def _on_host(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a target on the host that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
