"""The description of a checkpoint, made without reading array data and without touching a device.

`run_info` makes the part of a manifest that says who wrote it, and when.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from jaxckpt_train.errors import SettingsError, UnsupportedLeafError
from jaxckpt_train.pytree.leaves import (
    ArrayLeaf,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    decode_tree,
    describe_saved,
    has_tree,
    python_value,
)
from jaxckpt_train.pytree.restore import rebuild
from jaxckpt_train.store.committed import Committed, checkpoint_path
from jaxckpt_train.store.manifest import MAX_INFO_BYTES, ArrayRecord, PartRecord, encode_value, metrics_from_json
from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.store.threads import unlocked_cached_property


@dataclasses.dataclass(frozen=True)
class LeafMetadata:
    """The description of one leaf."""

    description: str  # such as `float32[512,128]`, `key<threefry2x32>[]`, `Python int`
    shape: tuple[int, ...] | None = None  # of an array or a key array
    dtype: np.dtype | None = None
    bytes: int = 0  # of its array data
    sharding: Any = None  # of the saved array, as `{"mesh": {"x": 4}, "spec": ["x", None]}`
    value: Any = None  # of a leaf that is stored inline (numbers, text)
    host: Literal["jax", "numpy", "scalar"] | None = None  # the kind of array that was saved


@dataclasses.dataclass(frozen=True)
class CheckpointableMetadata:
    """The description of one checkpointable."""

    name: str
    kind: str  # of its handler
    leaves: Mapping[str, LeafMetadata]  # by path; empty if it is not a tree
    bytes: int  # on disk
    # Nested dicts and lists of `jax.ShapeDtypeStruct` and plain values, as a target for a load; None: not a tree. A
    # PRNG key of an implementation that this process does not know is described as its key data.
    tree: Any


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """The description of a committed checkpoint.

    Attributes:
        path: its directory.
        format_version: the version of its format.
        digest: the name of the digest of its blocks.
        step: its label, if a StepManager saved it.
        created: the time of the save, ISO 8601 in UTC.
        metrics: the metrics that were saved with the step.
        custom_metadata: the custom metadata that was saved.
        versions: the versions of the packages that wrote it.
        bytes: the size of all its data files.
    """

    path: str
    format_version: int
    digest: str
    step: int | None
    created: str
    metrics: Mapping[str, float]
    custom_metadata: Any
    versions: Mapping[str, str]
    bytes: int
    _committed: Committed = dataclasses.field(repr=False, compare=False)

    @unlocked_cached_property
    def checkpointables(self) -> Mapping[str, CheckpointableMetadata]:
        """The checkpointables by name, decoded at the first access."""
        return {part.name: _describe_part(part, self.path) for part in self._committed.manifest.parts}


def describe(committed: Committed) -> CheckpointMetadata:
    """Return the metadata of an opened checkpoint."""
    manifest, info = committed.manifest, committed.manifest.info
    return CheckpointMetadata(
        path=checkpoint_path(committed.directory),
        format_version=manifest.format_version,
        digest=manifest.digest,
        step=info.get("step"),
        created=str(info.get("created", "")),
        metrics=metrics_from_json(info.get("metrics")),
        custom_metadata=info.get("custom_metadata"),
        versions=info.get("versions") or {},
        bytes=committed.data_bytes,
        _committed=committed,
    )


def _describe_part(part: PartRecord, directory: str) -> CheckpointableMetadata:
    size = sum(map(_array_bytes, part.arrays)) + sum(file.bytes for file in part.files)
    if not has_tree(part):
        return CheckpointableMetadata(part.name, part.kind, {}, size, None)
    record: TreeRecord = decode_tree(part, directory)
    arrays = {array.name: array for array in part.arrays}
    leaves = {name: _describe_leaf(name, leaf, arrays.get(name), directory) for name, leaf in record.leaves.items()}
    abstract = {name: _abstract(record.leaves[name], leaf, arrays.get(name)) for name, leaf in leaves.items()}
    return CheckpointableMetadata(part.name, part.kind, leaves, size, rebuild(record, abstract, directory))


def _describe_leaf(name: str, leaf: LeafRecord, array: ArrayRecord | None, directory: str) -> LeafMetadata:
    description = describe_saved(leaf, array)
    if array is None:
        return LeafMetadata(description, value=python_value(name, leaf, directory))
    shape = array.shape[:-1] if isinstance(leaf, KeyLeaf) else array.shape
    host = leaf.host if isinstance(leaf, ArrayLeaf) else None
    return LeafMetadata(description, shape, DTYPES[array.dtype], _array_bytes(array), array.sharding, host=host)


def _array_bytes(array: ArrayRecord) -> int:
    return math.prod(array.shape) * DTYPES[array.dtype].itemsize


def _abstract(record: LeafRecord, leaf: LeafMetadata, array: ArrayRecord | None) -> Any:
    if array is None:
        return leaf.value
    struct: Any = jax.ShapeDtypeStruct
    if isinstance(record, KeyLeaf):
        key_dtype = _key_dtype(record.impl)
        return struct(array.shape, leaf.dtype) if key_dtype is None else struct(leaf.shape, key_dtype)
    return struct(leaf.shape, leaf.dtype)


def _key_dtype(impl: str) -> Any:
    """Return the dtype of keys of this implementation, or None if this process does not know it."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except (TypeError, ValueError):
        return None


def run_info(custom_metadata: Any = None, **more: Any) -> dict[str, Any]:
    """Return the part of a manifest that says who wrote it, and when; refuse metadata that JSON changes."""
    try:
        encoded = encode_value(custom_metadata, is_strict=True)
        custom = msgspec.json.decode(encoded)  # a copy, since the manifest is encoded later
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"custom_metadata: {error}") from error
    versions = {"jaxckpt_train": package_version(), "jax": jax.__version__}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    info = {"created": created, "versions": versions, "custom_metadata": custom, **more}
    size = len(msgspec.json.encode(info))
    if size > MAX_INFO_BYTES:
        largest = max(info, key=lambda name: len(msgspec.json.encode(info[name])))
        raise SettingsError(
            f"{largest}: expected at most {MAX_INFO_BYTES:,} bytes of JSON in the manifest's information on this save, "
            f"found {size:,}; save it as a separate checkpointable, as JsonValue"
        )
    return info


@functools.cache
def package_version() -> str:
    """Return the version of this package, or "unknown" if it runs from a folder that was never installed."""
    try:
        return importlib.metadata.version("jaxckpt-train")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
