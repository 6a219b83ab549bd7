"""The names of Orbax's `args`, for programs that have no Orbax: what is saved or restored, and as what.

Each says by its type what the checkpointable is, and has the attributes of Orbax's class of the same name. Those that
`orbax_manager` refuses, or that have no effect, are told when they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxckpt_train.errors import SettingsError


@dataclasses.dataclass
class StandardSave:
    """Save a pytree.

    Attributes:
        item: the pytree; numbers, text, keys and NumPy arrays among its leaves come back as such.
        save_args: a tree of `SaveArgs`; None: each leaf as it is.
        custom_metadata: None: it belongs to the step, as `save(..., custom_metadata=...)`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore:
    """Restore a pytree.

    Attributes:
        item: the target, of arrays, `jax.ShapeDtypeStruct`s, or values; None: as it was saved, in dicts, lists and
            tuples.
        strict: True: shapes must fit.
        support_layout: False.
        fallback_sharding: of leaves that bring none; None: the default device.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None


@dataclasses.dataclass
class PyTreeSave:
    """As `StandardSave`.

    Attributes:
        ocdbt_target_data_file_size: has no effect; `StoreSettings.segment_bytes` is ours.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore:
    """Restore a pytree, each leaf as its own arguments say.

    Attributes:
        item: a tree of the structure that is restored, whose leaves may be anything; None: as it was saved.
        restore_args: a tree of `RestoreArgs`, with the structure of `item` or of a part of it.
        transforms: None; or {}, which is as `partial_restore`.
        legacy_transform_fn: None.
        partial_restore: whether what is not in `item` is passed over.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclasses.dataclass
class SaveArgs:
    """How one leaf is saved.

    Attributes:
        dtype: the dtype that it is converted to; None: its own.
    """

    dtype: Any = None


@dataclasses.dataclass
class RestoreArgs:
    """How one leaf is restored.

    Attributes:
        restore_type: `np.ndarray`: on the host; `jax.Array`, int, float, str; None: as it was saved.
        dtype: the dtype that it is converted to; None: that of the checkpoint.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How one leaf is restored as a `jax.Array`.

    Attributes:
        mesh, mesh_axes: its sharding, as a mesh and a `jax.sharding.PartitionSpec`; None: see `sharding`.
        sharding: its sharding; None: the one that it was saved with, else the default device.
        global_shape: its shape, which has to be that of the checkpoint; None: not compared.
    """

    restore_type: Any = jax.Array
    mesh: jax.sharding.Mesh | None = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None


@dataclasses.dataclass
class JsonSave:
    """Save plain JSON data: None, bool, int, float, text, and lists and dicts of these with text keys."""

    item: Any


@dataclasses.dataclass
class JsonRestore:
    """Restore JSON data as it was saved; `item` is not looked at."""

    item: Any = None


@dataclasses.dataclass
class ArraySave:
    """Save one array or number."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore:
    """Restore one array or number; `restore_args` as one leaf of `PyTreeRestore.restore_args`."""

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JaxRandomKeySave:
    """Save one PRNG key of JAX."""

    item: jax.Array
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore:
    """Restore one PRNG key of JAX."""

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave:
    """Save the state of a NumPy generator: of `np.random.get_state()`, or of a bit generator's `state`."""

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore:
    """Restore the state of a NumPy generator."""


@dataclasses.dataclass
class CheckpointSave:
    """Save the position of a data iterator, as Grain's class of this name: of Grain, or with `get_state`."""

    item: Any


@dataclasses.dataclass
class CheckpointRestore:
    """Set a data iterator to the saved position, as Grain's class of this name."""

    item: Any


class Composite(Mapping[str, Any]):
    """Several checkpointables by name, to save or restore, or as they were restored: `found.state`, `found["state"]`.

    Raises:
        SettingsError: a name begins with two underscores.
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise SettingsError(f"Composite: expected names that do not begin with '__', found {name!r}")
        super().__setattr__("_items", items)

    def __getitem__(self, name: str) -> Any:
        items: dict[str, Any] = self._items
        if name not in items:
            raise KeyError(f"{name!r}: expected one of {', '.join(map(repr, items)) or 'none'}")
        return items[name]

    def __getattr__(self, name: str) -> Any:
        items: dict[str, Any] = super().__getattribute__("_items")
        if name in items:
            return items[name]
        raise AttributeError(f"{name!r}: expected one of {', '.join(map(repr, items)) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Composite does not change; make a new one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"
