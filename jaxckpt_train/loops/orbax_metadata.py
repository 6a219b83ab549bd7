"""What the manager in Orbax's form says of a run, a step and a tree, with Orbax's names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.manifest import MAX_INFO_BYTES
from jaxckpt_train.store.plain_files import read_or_none

_FOLDER, _FILE, _OLD_FILE = "metadata", "_ROOT_METADATA", "metadata"


@dataclasses.dataclass(frozen=True)
class RootMetadata:
    """What was given with a run.

    Attributes:
        custom_metadata: as given to the manager that made the run; {}: nothing.
        internal_metadata: {}.
    """

    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    internal_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """What a step holds.

    Attributes:
        item_metadata: as `CheckpointManager.item_metadata` gives it.
        metrics: numbers by name.
        custom_metadata: as given to `save`; {}: nothing.
    """

    item_metadata: Any
    metrics: Mapping[str, float]
    custom_metadata: Any


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata(Mapping[str, Any]):
    """What one tree of a step holds: `tree`, and its top level by key. It is a pytree with the leaves of `tree`.

    Attributes:
        tree: nested dicts and lists, with a `jax.ShapeDtypeStruct` for each array and number, else the value itself.
        custom_metadata: None: such is kept for a step.
    """

    custom_metadata = None

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """For JAX: `tree` is the only child."""
        return ((jax.tree_util.GetAttrKey("tree"), self.tree),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> TreeMetadata:
        """For JAX."""
        return cls(children[0])


def write_root_metadata(directory: str, metadata: Mapping[str, Any]) -> None:
    """Keep what was given with a run in a file of its own, where Orbax has it, unless there is one.

    Raises:
        SettingsError: it is no plain JSON data, or 1 MiB of it and more.
    """
    try:
        data = json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"CheckpointManager: metadata: expected plain JSON data, found {error}") from error
    if len(data) > MAX_INFO_BYTES:
        raise SettingsError(f"CheckpointManager: metadata: expected at most {MAX_INFO_BYTES} bytes, found {len(data)}")
    backend = LocalBackend()
    backend.make_directory(f"{directory}/{_FOLDER}", parents=True, sync=True)
    backend.write_new(f"{directory}/{_FOLDER}/{_FILE}", data.encode())


def read_root_metadata(directory: str) -> dict[str, Any] | None:
    """What was given with a run, also one that Orbax has written; None: nothing.

    Raises:
        CorruptCheckpointError: the file holds something else.
    """
    for name in (_FILE, _OLD_FILE):
        data = read_or_none(LocalBackend(), f"{directory}/{_FOLDER}", name, MAX_INFO_BYTES)
        if data is None:
            continue
        try:
            found = json.loads(data)
        except ValueError as error:
            raise CorruptCheckpointError(f"{directory}/{_FOLDER}/{name}: expected JSON, found {error}") from error
        custom = found.get("custom_metadata") if name == _FILE and isinstance(found, dict) else found
        if not isinstance(custom, dict):
            raise CorruptCheckpointError(f"{directory}/{_FOLDER}/{name}: expected an object of JSON, found {custom!r}")
        return custom
    return None
