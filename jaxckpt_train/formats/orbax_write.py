"""Writes a checkpoint as a step that both of Orbax's interfaces restore.

TensorStore writes the arrays: small ones in batches of one transaction, large ones in pieces.
"""

from __future__ import annotations

import base64
import collections
import errno
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import MismatchError, SettingsError, StorageError
from jaxckpt_train.formats.orbax_names import STEP_METADATA, TREE_METADATA
from jaxckpt_train.formats.orbax_read import ARRAY_METADATAS, DONE, METRICS, STRINGS, VALUE
from jaxckpt_train.formats.tensorstore_reads import kvstore_of, system_error, tensorstore
from jaxckpt_train.pytree.leaves import (
    ROOT,
    EmptyLeaf,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    TreeRecord,
    decode_tree,
    parse_key,
    python_value,
    split,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener
from jaxckpt_train.store.boxes import Box, box_shape, cut_box, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.copy import LazyBox
from jaxckpt_train.store.manifest import (
    ArrayRecord,
    PartRecord,
    is_plain_name,
    metrics_from_json,
    plain_name_rule,
    shown,
)
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.store.transaction import Attempt, atomic_directory

CHUNK_BYTES = 64 << 20
AHEAD_BYTES = 256 << 20  # the limit of data in memory until TensorStore has written it
BATCH_BYTES = 16 << 20  # of small arrays; one commit for each would write files and rewrite the index each time
_LEAF_BYTES = 4 << 10  # the approximate overhead of an array in a batch
_WRITE = "write through TensorStore"
# TensorStore's configuration of a database with a single writer, as Orbax sets it.
_DATABASE = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
MAX_RANK = 32  # the limit of TensorStore
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREES = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_VALUES = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
_ON_ONE_DEVICE = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
_EMPTY = {"list": "List", "tuple": "Tuple", "dict": "Dict"}


def export_orbax(
    files: Opener,
    committed: Committed,
    part: PartRecord,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    item: str | None = None,
    progress: ReadProgress | None = None,
) -> str:
    """Write a tree as the only item of a step of Orbax at the absolute path `final`, and return the item's name.

    Raises MismatchError: Orbax has no equivalent for a leaf; SettingsError: the item name is invalid, or TensorStore is
    not installed; CheckpointExistsError: something exists at `final`.
    """
    if item is not None and (not is_plain_name(item) or item in (METRICS, STEP_METADATA)):
        expected = f"the name of a folder ({plain_name_rule()}, {METRICS}, {STEP_METADATA})"
        raise SettingsError(f"export: the item of {part.name!r}: expected {expected}, found {item!r}")
    item = item or part.name
    leaves = _tree_leaves(committed, part)
    start_ns = time.time_ns()
    with atomic_directory(backend, final, settings) as attempt:
        attempt.add_folder(item)
        ahead_bytes = min(AHEAD_BYTES, settings.read_budget_bytes)
        with _Writes(backend, f"{attempt.directory}/{item}", ahead_bytes, progress) as writes:
            for leaf in leaves:
                _write_leaf(files, committed, settings, leaf, writes)
        attempt.track_folder(item)
        _write_structure(attempt, item, leaves)
        handlers = {item: _TREES}
        metrics = metrics_from_json(committed.manifest.info.get("metrics"))
        if metrics and item != METRICS:  # Orbax's own item, in Python's JSON, which can represent nan and inf
            attempt.add_folder(METRICS)
            attempt.write_file(f"{METRICS}/{METRICS}", json.dumps(metrics).encode())
            handlers[METRICS] = _VALUES
        custom = committed.manifest.info.get("custom_metadata")
        metadata = {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": start_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": custom if isinstance(custom, Mapping) else {},
        }
        attempt.write_file(STEP_METADATA, msgspec.json.encode(metadata))
        for folder in (*handlers, "") if is_url(final) else ():  # where Orbax takes a folder without it for unfinished
            name = f"{folder}/{DONE}".removeprefix("/")
            attempt.write_file(name, f"Commit successful to {final}".encode())
    return item


def is_nnx_state(part: PartRecord, subject: str) -> bool:
    """Return whether a tree has Flax NNX states, which Orbax saves with a level `value` below each variable.

    A checkpoint of this library does not record which leaves were variables, so an operation of the user names them.
    """
    tree = decode_tree(part, subject)
    has_states = any(container.startswith("object flax.nnx.") for container in tree.containers.values())
    return has_states and not any(name.endswith(VALUE) for name in tree.leaves)


class _Leaf(NamedTuple):
    """A leaf to write: its keys, each with 1 for a position in a sequence or 2, its Orbax type, and its content."""

    path: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    content: ArrayRecord | np.ndarray | str | None = None
    implementation: str | None = None

    @property
    def parameter(self) -> str:
        return ".".join(key for key, _ in self.keys)

    @property
    def dtype(self) -> np.dtype:
        assert isinstance(self.content, ArrayRecord | np.ndarray)
        return DTYPES[self.content.dtype] if isinstance(self.content, ArrayRecord) else self.content.dtype

    def boxes(self) -> list[Box]:
        assert isinstance(self.content, ArrayRecord | np.ndarray)
        return list(cut_box(full_box(self.content.shape), self.dtype.itemsize, CHUNK_BYTES))


def _tree_leaves(committed: Committed, part: PartRecord) -> list[_Leaf]:
    record = decode_tree(part, committed.directory)
    arrays = {array.name: array for array in part.arrays}
    found = [_leaf(committed.directory, record, name, leaf, arrays.get(name)) for name, leaf in record.leaves.items()]
    seen: dict[str, str] = {}
    for each in found:
        if seen.setdefault(each.parameter, each.path) != each.path:
            both = f"leaves {seen[each.parameter]!r} and {each.path!r}"
            raise MismatchError(f"{committed.directory}: {both} would both be called {each.parameter!r} by Orbax")
    return found


def _leaf(subject: str, tree: TreeRecord, path: str, leaf: LeafRecord, array: ArrayRecord | None) -> _Leaf:
    keys = _keys(tree, path)
    if array is not None:
        if len(array.shape) > MAX_RANK:
            found = f"expected at most {MAX_RANK} axes, the limit of Orbax, found {len(array.shape)}; reshape it"
            raise MismatchError(f"{subject}: leaf {path!r}: {found}")
        if isinstance(leaf, KeyLeaf):
            return _Leaf(path, keys, "jax.Array", array, leaf.impl)
        # Not as a JAX array: restoring one without a target requires the devices of the original array.
        return _Leaf(path, keys, "np.ndarray", array)
    if isinstance(leaf, NoneLeaf | EmptyLeaf):
        if not keys:
            raise MismatchError(f"{subject}: expected a tree with leaves, found an empty one, which Orbax cannot save")
        kind = tree.containers.get(path, "dict").partition(" ")[0] if isinstance(leaf, EmptyLeaf) else ""
        return _Leaf(path, keys, _EMPTY.get(kind, "None"))  # Orbax saves a NamedTuple without fields as None
    value = python_value(path, leaf, subject)
    if isinstance(value, str):
        return _Leaf(path, keys, "string", value)
    if isinstance(value, complex):  # as an array: Orbax refuses to restore an item with a complex scalar
        return _Leaf(path, keys, "np.ndarray", np.asarray(value))
    if isinstance(value, bytes) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise MismatchError(
            f"{subject}: leaf {path!r}: Orbax does not support "
            f"{'bytes' if isinstance(value, bytes) else 'integers beyond 64 bits'}; leave it out (the operation drop)"
        )
    return _Leaf(path, keys, "scalar", np.asarray(value))


def _keys(tree: TreeRecord, path: str) -> tuple[tuple[str, int], ...]:
    keys, found = split(path), []
    for depth, key in enumerate(keys):
        container = tree.containers.get("/".join(keys[:depth]) or ROOT, "dict").partition(" ")[0]
        found.append((str(parse_key(key)), 1 if container in ("list", "tuple") else 2))
    return tuple(found)


def _write_structure(attempt: Attempt, item: str, leaves: Sequence[_Leaf]) -> None:
    """Write everything of an item except the content of its arrays."""
    entries, arrays, texts = {}, [], {}
    for leaf in leaves:
        value: dict[str, Any] = {"value_type": leaf.value_type, "skip_deserialize": leaf.content is None}
        if isinstance(leaf.content, str):
            texts[leaf.parameter] = leaf.content
        if isinstance(leaf.content, ArrayRecord) and leaf.value_type == "jax.Array":
            shape = {"write_shape": list(leaf.content.shape)}
            value |= shape
            extra = {
                "chunk_shape": list(box_shape(leaf.boxes()[0])),
                "ext_metadata": {"random_key_impl": leaf.implementation},
            }
            arrays.append({"array_metadata": {"param_name": leaf.parameter, **shape, **extra}})
        keys = [{"key": key, "key_type": kind} for key, kind in leaf.keys]
        entries[str(tuple(key for key, _ in leaf.keys))] = {"key_metadata": keys, "value_metadata": value}
    tree = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    attempt.write_file(f"{item}/{TREE_METADATA}", msgspec.json.encode(tree))
    if texts:
        attempt.write_file(f"{item}/{STRINGS}", msgspec.json.encode(texts))
    if arrays:
        names = [leaf.parameter for leaf in leaves if leaf.value_type == "jax.Array"]
        shardings = {base64.b64encode(name.encode()).decode(): _ON_ONE_DEVICE for name in names}
        attempt.write_file(f"{item}/_sharding", msgspec.json.encode(shardings))
        attempt.add_folder(f"{item}/{ARRAY_METADATAS}")
        attempt.write_file(f"{item}/{ARRAY_METADATAS}/process_0", msgspec.json.encode({"array_metadatas": arrays}))


def _write_leaf(files: Opener, committed: Committed, settings: StoreSettings, leaf: _Leaf, writes: _Writes) -> None:
    if not isinstance(leaf.content, ArrayRecord | np.ndarray):
        return
    boxes, dtype = leaf.boxes(), leaf.dtype
    batch = writes.batch(math.prod(leaf.content.shape) * dtype.itemsize)
    try:
        store = writes.create(leaf.parameter, leaf.content.shape, dtype.name, box_shape(boxes[0]), batch)
    except (ValueError, OSError) as error:
        problem = f"{committed.directory}: leaf {leaf.path!r} of {dtype.name}: {shown(error)}"
        raise system_error(error, _WRITE, writes.directory) or MismatchError(problem) from error
    for box in boxes:
        if isinstance(leaf.content, np.ndarray):
            data = leaf.content
        else:
            data = LazyBox(files, committed, leaf.content, box, settings).fetch()
        part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
        if batch is not None:
            writes.result(part.write(data).copy)
        else:
            writes.make_room(data.nbytes)
            writes.add(data.nbytes, data.nbytes, part.write(data).commit)


class _Writes:
    """The running writes of TensorStore. None of them is running after the block, even if it raises.

    `ahead_bytes` limits the data that is held until it is written, in addition to a batch and the box being read.
    """

    def __init__(self, backend: Backend, directory: str, ahead_bytes: int, progress: ReadProgress | None) -> None:
        self._ts, self._base = tensorstore("export: Orbax arrays are written"), kvstore_of(backend, directory)
        self._context = self._ts.Context({"file_io_concurrency": {"limit": 16}})
        self.directory, self._progress = directory, progress
        self._waiting: collections.deque[tuple[int, int, Any]] = collections.deque()
        self._most, self._held = ahead_bytes, 0
        self._batch: Any = None
        self._in_batch = self._held_by_batch = 0

    def __enter__(self) -> _Writes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._commit()
                while self._waiting:
                    self._settle_oldest()
        finally:  # after an error, a late write would recreate files in a directory that is being removed
            if self._batch is not None:
                self._batch.abort()
            for *_, future in self._waiting:
                future.exception()

    def create(self, name: str, shape: Sequence[int], dtype: str, chunk: Sequence[int], batch: Any) -> Any:
        database = {
            "driver": "ocdbt",
            "base": self._base,
            "path": f"{name}/" if name else "",  # the name is empty if the tree is a single array
            "config": _DATABASE,
        }
        metadata = {
            "shape": list(shape),
            "chunks": [max(1, size) for size in chunk],
            "compressor": {"id": "zstd", "level": 1},
        }
        options = {"store_data_equal_to_fill_value": True, "dtype": dtype}
        spec = {"driver": "zarr", "kvstore": database, "metadata": metadata, **options}
        return self._ts.open(spec, context=self._context, create=True, transaction=batch).result()

    def batch(self, nbytes: int) -> Any:
        """Return the transaction for an array of this size, and count the array. None: it is too large for a batch."""
        held, most = nbytes + _LEAF_BYTES, min(BATCH_BYTES, self._most // 4)
        if held > most:
            return None
        if self._held_by_batch + held > most:
            self._commit()
        if self._batch is None:
            self._batch = self._ts.Transaction()
        self._in_batch += nbytes
        self._held_by_batch += held
        return self._batch

    def make_room(self, nbytes: int) -> None:
        """Wait until this many more bytes can be held. Raises StorageError if a write has failed."""
        while self._waiting and self._held + nbytes > self._most:
            self._settle_oldest()

    def add(self, held: int, nbytes: int, future: Any) -> None:
        """Add a running write of `nbytes` bytes, which holds `held` bytes of memory until it ends."""
        self._waiting.append((held, nbytes, future))
        self._held += held

    def result(self, future: Any) -> None:
        """Wait for an operation. Raises StorageError if it has failed."""
        try:
            future.result()
        except (ValueError, OSError) as error:
            raise system_error(error, _WRITE, self.directory) or StorageError(
                errno.EIO, f"TensorStore: {shown(error)}", self.directory
            ) from error

    def _commit(self) -> None:
        if self._batch is not None:
            self.make_room(self._held_by_batch)
            self.add(self._held_by_batch, self._in_batch, self._batch.commit_async())
            self._batch, self._in_batch, self._held_by_batch = None, 0, 0

    def _settle_oldest(self) -> None:
        held, nbytes, future = self._waiting[0]
        self.result(future)
        self._waiting.popleft()
        self._held -= held
        if self._progress is not None:
            self._progress(nbytes)
