"""What Orbax's `args` mean here: which checkpointable they save, which target they restore into.

Objects of Orbax, of Grain, and those of `orbax_args` are known by the names of their classes; none is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt_train.checkpoint_metadata import CheckpointableMetadata
from jaxckpt_train.checkpointables.per_process_value import PerProcess
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.loops.orbax_args import Composite
from jaxckpt_train.tree.flatten import EMPTY, flatten, unflatten

_TREES = ("Standard", "PyTree", "Array", "JaxRandomKey")
_OTHERS = ("Json", "NumpyRandomKey", "Checkpoint", "PyGrainCheckpoint")
_KINDS = {f"{name}{what}": (name, what) for name in (*_TREES, *_OTHERS) for what in ("Save", "Restore")}
_COMPOSITE, DEFAULT_ITEM = "Composite", "default"
_HANDLERS = {f"{name}CheckpointHandler" for name in (*_TREES, "Json", "NumpyRandomKey", "", "PyGrain")}
# What a load here does not do, by attribute: what it has to be, and what to do instead.
_UNDONE: dict[str, tuple[Any, str]] = {
    "strict": (True, "arrays are neither cut nor padded: restore what was saved, and change it then"),
    "support_layout": (False, "arrays are restored in the default layout of their devices"),
    "transforms": (None, 'use jaxckpt_train.load(manager.path(step), like, rename={"old/**": "new/**"})'),
    "legacy_transform_fn": (None, 'use jaxckpt_train.load(manager.path(step), like, rename={"old/**": "new/**"})'),
    "partial_restore": (False, 'use jaxckpt_train.load(manager.path(step), like, only="params/**")'),
    "custom_metadata": (None, "it is kept for a step, not for an item: pass it to save(..., custom_metadata=...)"),
}


class Items:
    """Whether a manager has one checkpointable without a name, or several by name.

    Args:
        item_names: their names; None: args tell.
        item_handlers: Orbax's handlers, one or several by name; None: args tell.

    Raises:
        SettingsError: a handler saves in a way of its own.
    """

    def __init__(self, item_names: Any, item_handlers: Any) -> None:
        has_names = isinstance(item_handlers, Mapping)
        for handler in item_handlers.values() if has_names else [item_handlers]:
            if handler is not None and type(handler).__name__ not in _HANDLERS:
                raise SettingsError(
                    f"CheckpointManager: item_handlers: expected handlers of Orbax or Grain, found a "
                    f"{type(handler).__qualname__}: register it by jaxckpt_train.register_handler(type, handler)"
                )
        self._is_single: bool | None = None if item_names is None and item_handlers is None else True
        if item_names is not None or has_names:
            self._is_single = False

    def to_save(self, args: Any) -> dict[str, Any]:
        """What is to be saved, by name.

        Raises:
            SettingsError: these are no args to save with, or not as before one, or several.
        """
        return {name: checkpointable_of(name, each) for name, each in self._named(args).items()}

    def targets(self, args: Any, saved: Mapping[str, CheckpointableMetadata] | None) -> dict[str, Any] | None:
        """What is restored into what, by name; None: all, without targets.

        Args:
            args: those to restore with; None: all, as it was saved.
            saved: what there is, by name; None: that is not known.

        Raises:
            SettingsError: these are no args to restore with, or not as before one, or several.
        """
        named = dict.fromkeys(saved or ()) if args is None else self._named(args)
        return {name: target_of(name, each, (saved or {}).get(name)) for name, each in named.items()} or None

    def found(self, values: Mapping[str, Any]) -> Any:
        """What a caller gets of these: the one, or a Composite."""
        is_one = self._is_single is not False and values.keys() == {DEFAULT_ITEM}
        return values[DEFAULT_ITEM] if is_one else Composite(**values)

    def _named(self, args: Any) -> dict[str, Any]:
        if args is None:
            raise SettingsError("args: expected one of args.StandardSave, ..., or an args.Composite, found None")
        is_single = not any(_plain_name(cls) == _COMPOSITE for cls in type(args).__mro__)
        if self._is_single is None:
            self._is_single = is_single
        if self._is_single != is_single:
            expected = "args of one checkpointable" if self._is_single else "an args.Composite"
            raise SettingsError(f"args: expected {expected}, as before, found {type(args).__qualname__}")
        return {DEFAULT_ITEM: args} if is_single else dict(args.items())


def checkpointable_of(name: str, args: Any) -> Any:
    """What is to be saved under a name.

    Raises:
        SettingsError: it is no args to save with, or asks for what is not done here.
    """
    kind = _kind_of(name, args, "Save")
    _refuse_undone(name, args)
    if kind == "Json":
        return JsonValue(args.item)
    if kind == "NumpyRandomKey":
        return PerProcess(args.item)
    for leaf in jax.tree_util.tree_leaves(getattr(args, "save_args", None)):
        if getattr(leaf, "dtype", None) is not None:
            raise SettingsError(
                f"args of {name!r}: save_args: expected no dtype, found {leaf.dtype}: convert the tree beforehand"
            )
    return args.item


def target_of(name: str, args: Any, saved: CheckpointableMetadata | None) -> Any:
    """What a checkpointable is restored into.

    Args:
        name: of it.
        args: those to restore with; None: as it was saved.
        saved: what it is like; None: that is not known.

    Raises:
        SettingsError: it is no args to restore with, or asks for what is not done here.
    """
    if args is None:
        return _as_saved(saved, None)
    kind = _kind_of(name, args, "Restore")
    _refuse_undone(name, args)
    if kind == "Json":
        return JsonValue(None)
    if kind == "NumpyRandomKey":
        return PerProcess(None)
    if kind not in _TREES:
        return args.item
    item, fallback = getattr(args, "item", None), getattr(args, "fallback_sharding", None)
    target = _as_saved(saved, fallback) if item is None or kind == "Array" else item
    restore_args = getattr(args, "restore_args", None)
    return target if target is None else _placed(name, target, restore_args, fallback)


def plain(restored: Any) -> Any:
    """What was restored, without the mark that says how it was saved."""
    return restored.value if isinstance(restored, (JsonValue, PerProcess)) else restored


def _plain_name(cls: type) -> str:
    return cls.__name__.removesuffix("Args")


def _kind_of(name: str, args: object, what: str) -> str:
    for cls in type(args).__mro__:
        kind, found = _KINDS.get(_plain_name(cls), ("", ""))
        if found == what:
            return kind
    cls, known = type(args), ", ".join(f"{kind}{what}" for kind in (*_TREES, *_OTHERS[:-1]))
    raise SettingsError(
        f"args of {name!r}: expected one of args.{known}, found {cls.__module__}.{cls.__qualname__}; an object of "
        "another kind is saved as JSON, or by a handler (jaxckpt_train.register_handler) and StandardSave(object)"
    )


def _refuse_undone(name: str, args: object) -> None:
    for attribute, (wanted, instead) in _UNDONE.items():
        found = getattr(args, attribute, wanted)
        if found is not wanted and found != wanted:
            raise SettingsError(f"args of {name!r}: {attribute}: expected {wanted}, found {found!r}: {instead}")


def _as_saved(saved: CheckpointableMetadata | None, fallback: jax.sharding.Sharding | None) -> Any:
    """A target like what was saved, on as many devices if there are so many; None: without one."""
    if saved is None or saved.tree is None:
        return None
    flat = flatten(saved.tree)
    shardings = [saved.leaves[name].sharding if name in saved.leaves else None for name in flat.names]
    leaves = [
        _struct(leaf, _sharding_of(sharding) or fallback) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        for leaf, sharding in zip(flat.leaves, shardings, strict=True)
    ]
    return unflatten(saved.tree, leaves)


def _sharding_of(saved: Any) -> jax.sharding.Sharding | None:
    """The sharding that an array had, over the first devices of this process's job; None: there are too few."""
    try:
        axes, spec = dict(saved["mesh"]), [tuple(axis) if isinstance(axis, list) else axis for axis in saved["spec"]]
    except (KeyError, TypeError, ValueError):  # it is there for people, and may be anything
        return None
    count = math.prod(axes.values())
    if count > len(jax.devices()):
        return None
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    partition: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(mesh, partition(*spec))


def _placed(name: str, target: Any, restore_args: Any, fallback: jax.sharding.Sharding | None) -> Any:
    """The target, each leaf where its own arguments want it; the very object if they want nothing."""
    try:
        wanted = flatten(restore_args) if restore_args is not None else flatten({})
        flat = flatten(target)
    except TypeError as error:
        raise SettingsError(f"args of {name!r}: expected trees, found {error}") from error
    by_name: Mapping[str, Any] = dict(zip(wanted.names, wanted.leaves, strict=True))
    leaves = [_leaf(leaf, by_name.get(path), fallback) for path, leaf in zip(flat.names, flat.leaves, strict=True)]
    is_same = all(one is other for one, other in zip(leaves, flat.leaves, strict=True))
    return target if is_same else unflatten(target, leaves)


def _leaf(leaf: Any, args: Any, fallback: jax.sharding.Sharding | None) -> Any:
    if leaf is None or leaf is EMPTY or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    dtype, sharding = getattr(args, "dtype", None), _wanted_sharding(args)
    if getattr(args, "restore_type", None) is np.ndarray:
        return _on_host(leaf.shape, dtype or leaf.dtype)
    if sharding is None and dtype is None and not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    there = getattr(leaf, "sharding", None) or fallback
    return _struct(leaf, sharding or there, dtype)


def _wanted_sharding(args: Any) -> Any:
    """Where the arguments of one leaf want it; None: nowhere in particular."""
    sharding: Any = getattr(args, "sharding", None)
    mesh = getattr(args, "mesh", None)
    if sharding is None and mesh is not None:
        return jax.sharding.NamedSharding(mesh, args.mesh_axes)
    return sharding.to_jax_sharding() if hasattr(sharding, "to_jax_sharding") else sharding


def _struct(leaf: Any, sharding: Any, dtype: Any = None) -> Any:
    """An abstract array; of a dtype that JAX holds only with 64-bit types switched on: an array of NumPy."""
    struct: Any = jax.ShapeDtypeStruct
    dtype = leaf.dtype if dtype is None else dtype
    if not _fits_jax(dtype):
        return _on_host(leaf.shape, dtype)
    is_it = isinstance(leaf, struct) and leaf.sharding is sharding and leaf.dtype == dtype
    return leaf if is_it else struct(leaf.shape, dtype, sharding=sharding)


def _fits_jax(dtype: Any) -> bool:
    dtypes: Any = jax.dtypes
    is_key = dtypes.issubdtype(dtype, dtypes.extended)
    return bool(is_key or dtypes.canonicalize_dtype(dtype) == dtype)


def _on_host(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A target on the host that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
