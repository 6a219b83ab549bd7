"""Writes a checkpoint as a step that both of Orbax's interfaces restore.

TensorStore writes the arrays: small ones in batches of one transaction, large ones in pieces.
"""

from __future__ import annotations

import base64
import collections
import errno
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError, StorageError
from jaxckpt_train.formats.orbax_metadata import (
    AGGREGATE,
    ARRAY_METADATAS,
    STEP_METADATA,
    STRINGS,
    TREE_METADATA,
    VALUE,
)
from jaxckpt_train.formats.orbax_read import METRICS, encode_aggregate, placeholder
from jaxckpt_train.formats.tensorstore_reads import system_error, tensorstore
from jaxckpt_train.pytree.leaves import (
    BoolLeaf,
    ComplexLeaf,
    EmptyLeaf,
    FloatLeaf,
    IntLeaf,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    StrLeaf,
    TreeRecord,
    decode_tree,
    has_tree,
    python_value,
)
from jaxckpt_train.pytree.paths import ROOT, parse_key, split
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener
from jaxckpt_train.store.boxes import Box, box_shape, cut_box, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.copy import LazyBox
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.files import read_recorded
from jaxckpt_train.store.manifest import (
    ArrayRecord,
    PartRecord,
    is_plain_name,
    metrics_from_json,
    plain_name_rule,
    shown,
)
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.transaction import Attempt, atomic_directory

CHUNK_BYTES = 64 << 20
AHEAD_BYTES = 256 << 20
"""The limit of array data that is held in memory until TensorStore has written it."""
BATCH_BYTES = 16 << 20
"""The limit of a batch of small arrays.

One commit for each of them would write files and rewrite the index each time.
"""
_LEAF_BYTES = 4 << 10  # the approximate overhead of an array in a batch
_WRITE = "write through TensorStore"
# TensorStore's configuration of a database with a single writer, as Orbax sets it.
_DATABASE = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
MAX_RANK = 32  # the limit of TensorStore
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREES, _VALUES = (
    f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
)
_NUMBERS = (BoolLeaf, IntLeaf, FloatLeaf)
_ON_ONE_DEVICE = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
_EMPTY = {"list": "List", "tuple": "Tuple", "dict": "Dict"}


def export_orbax(
    files: Opener,
    committed: Committed,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    parts: Sequence[str] | None = None,
    items: Mapping[str, str] | None = None,
    compressed: bool = True,
    progress: ReadProgress | None = None,
) -> tuple[str, ...]:
    """Write a checkpoint as a step of Orbax, with one item per checkpointable.

    Args:
        files: opens the files of the checkpoint.
        committed: the opened checkpoint.
        backend: the storage to write to, a local file system.
        final: the absolute path of the step directory. Nothing may exist there.
        settings: how the checkpoint is verified, and how durable the step is made.
        parts: the names of the checkpointables. None: all.
        items: other names for some of them, such as `{"state": "default"}`.
        compressed: compress with zstd, as Orbax does by default.
        progress: called with the number of bytes of each write.

    Returns:
        The names of the items.

    Raises:
        MismatchError: Orbax has no equivalent for a leaf or a checkpointable.
        SettingsError: an item name is invalid, or TensorStore is not installed.
        CheckpointExistsError: something exists at `final`.
        CorruptCheckpointError: the content of the checkpoint differs from what was saved.
        StorageError: the file system reported an error.
    """
    chosen = [part for part in committed.manifest.parts if parts is None or part.name in parts]
    names = _item_names([part.name for part in chosen], items or {})
    trees = {part.name: _tree_leaves(committed, part) for part in chosen if has_tree(part)}
    others = [part for part in chosen if part.name not in trees]
    for part in others:
        if part.kind != "json" or len(part.files) != 1:
            raise MismatchError(
                f"{committed.directory}: {part.name!r} is of kind {part.kind!r}, which Orbax does not support; "
                "leave it out"
            )
    write = functools.partial(
        write_arrays,
        subject=committed.directory,
        read=functools.partial(_read_box, files, committed, settings),
        compressed=compressed,
        ahead_bytes=min(AHEAD_BYTES, settings.read_budget_bytes),
        progress=progress,
    )
    start_ns = time.time_ns()
    with atomic_directory(backend, final, settings) as attempt:
        for part in chosen:
            item = names[part.name]
            attempt.add_folder(item)
            if part.name in trees:
                _write_tree(attempt, item, trees[part.name], write)
            else:
                data = read_recorded(files, committed.directory, part.files[0], None, committed.manifest.block_bytes)
                attempt.write_file(f"{item}/metadata", bytes(memoryview(data)))
        handlers = {names[part.name]: _TREES if part.name in trees else _VALUES for part in chosen}
        metrics = metrics_from_json(committed.manifest.info.get("metrics"))
        if metrics and METRICS not in handlers:
            _write_metrics(attempt, metrics)
            handlers[METRICS] = _VALUES
        attempt.write_file(STEP_METADATA, _step_metadata(committed, handlers, start_ns))
    return tuple(names.values())


def _item_names(parts: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for part in parts:
        name = given.get(part, part)
        if part in given and (not isinstance(name, str) or not is_plain_name(name) or name in (METRICS, STEP_METADATA)):
            expected = f"the name of a folder ({plain_name_rule()}, {METRICS}, {STEP_METADATA})"
            raise SettingsError(f"export: the item of {part!r}: expected {expected}, found {name!r}")
        if name in names.values():
            raise SettingsError(f"export: expected a different name for each item, found {name!r} twice")
        names[part] = name
    return names


def _write_metrics(attempt: Attempt, metrics: Mapping[str, float]) -> None:
    """Write metrics as Orbax's own item, in Python's JSON, which can represent nan and inf."""
    attempt.add_folder(METRICS)
    attempt.write_file(f"{METRICS}/{METRICS}", json.dumps(metrics).encode())


def is_nnx_state(part: PartRecord, subject: str) -> bool:
    """Return whether a tree has Flax NNX states that Orbax would only restore as nested dicts.

    Orbax saves each variable of an `nnx.state` as a container with one leaf, `value`. A checkpoint of this library does
    not record which leaves were variables, so an operation of the user must name them.
    """
    tree = decode_tree(part, subject)
    has_states = any(container.startswith("object flax.nnx.") for container in tree.containers.values())
    return has_states and not any(name.endswith(VALUE) for name in tree.leaves)


def _step_metadata(committed: Committed, handlers: Mapping[str, str], start_ns: int) -> bytes:
    custom = committed.manifest.info.get("custom_metadata")
    return msgspec.json.encode(
        {
            "item_handlers": dict(handlers),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": start_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": custom if isinstance(custom, Mapping) else {},
        }
    )


def _read_box(files: Opener, committed: Committed, settings: StoreSettings, array: ArrayRecord, box: Box) -> np.ndarray:
    return LazyBox(files, committed, array, box, settings).fetch()


class _Leaf(NamedTuple):
    """A leaf to write: its name in Orbax's files, its Orbax type, and its data if it has any."""

    path: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    content: ArrayRecord | np.ndarray | None = None
    text: str | None = None
    implementation: str | None = None

    @property
    def parameter(self) -> str:
        return ".".join(key for key, _ in self.keys)


def _tree_leaves(committed: Committed, part: PartRecord) -> list[_Leaf]:
    record = decode_tree(part, committed.directory)
    arrays = {array.name: array for array in part.arrays}
    found = [_leaf(committed.directory, record, name, leaf, arrays.get(name)) for name, leaf in record.leaves.items()]
    seen: dict[str, str] = {}
    for each in found:
        if seen.setdefault(each.parameter, each.path) != each.path:
            raise MismatchError(
                f"{committed.directory}: leaves {seen[each.parameter]!r} and {each.path!r} would both be called "
                f"{each.parameter!r} by Orbax; rename one of them"
            )
    return found


def _leaf(subject: str, tree: TreeRecord, path: str, leaf: LeafRecord, array: ArrayRecord | None) -> _Leaf:
    keys = _keys(tree, path)
    if array is not None:
        if len(array.shape) > MAX_RANK:
            raise MismatchError(
                f"{subject}: leaf {path!r}: expected at most {MAX_RANK} axes, the limit of Orbax, found "
                f"{len(array.shape)}; change the shape (the operation reshape)"
            )
        if isinstance(leaf, KeyLeaf):
            return _Leaf(path, keys, "jax.Array", array, implementation=leaf.impl)
        # Not as a JAX array: restoring one without a target requires the devices of the original array.
        return _Leaf(path, keys, "np.ndarray", array)
    if isinstance(leaf, NoneLeaf | EmptyLeaf) and not keys:
        raise MismatchError(f"{subject}: expected a tree with leaves, found an empty one, which Orbax cannot save")
    if isinstance(leaf, NoneLeaf):
        return _Leaf(path, keys, "None")
    if isinstance(leaf, EmptyLeaf):
        kind = tree.containers.get(path, "dict").partition(" ")[0]
        return _Leaf(path, keys, _EMPTY.get(kind, "None"))  # Orbax saves a NamedTuple without fields as None
    value = python_value(path, leaf, subject)
    if isinstance(leaf, StrLeaf):
        return _Leaf(path, keys, "string", text=value)
    if isinstance(leaf, ComplexLeaf):  # as an array: Orbax refuses to restore an item with a complex scalar
        return _Leaf(path, keys, "np.ndarray", np.asarray(value))
    if not isinstance(leaf, _NUMBERS) or (isinstance(leaf, IntLeaf) and not -(2**63) <= value < 2**63):
        raise MismatchError(
            f"{subject}: leaf {path!r}: Orbax does not support "
            f"{'integers beyond 64 bits' if isinstance(leaf, IntLeaf) else 'bytes'}; leave it out (the operation drop)"
        )
    return _Leaf(path, keys, "scalar", np.asarray(value))


def _keys(tree: TreeRecord, path: str) -> tuple[tuple[str, int], ...]:
    keys, found = split(path), []
    for depth, key in enumerate(keys):
        container = tree.containers.get("/".join(keys[:depth]) or ROOT, "dict").partition(" ")[0]
        found.append((str(parse_key(key)), 1 if container in ("list", "tuple") else 2))
    return tuple(found)


def _write_tree(
    attempt: Attempt,
    item: str,
    leaves: Sequence[_Leaf],
    write: Callable[[str, Sequence[ToWrite]], Mapping[str, list[int]]],
) -> None:
    contents = [ToWrite(leaf.path, leaf.parameter, leaf.content) for leaf in leaves if leaf.content is not None]
    chunks = write(f"{attempt.directory}/{item}", contents)
    entries, arrays = {}, []
    for leaf in leaves:
        value = {"value_type": leaf.value_type, "skip_deserialize": leaf.content is None and leaf.text is None}
        if leaf.value_type == "jax.Array":
            assert isinstance(leaf.content, ArrayRecord)
            value["write_shape"] = list(leaf.content.shape)
            extra = {"random_key_impl": leaf.implementation}
            array = {"param_name": leaf.parameter, "write_shape": list(leaf.content.shape)}
            arrays.append({"array_metadata": {**array, "chunk_shape": chunks[leaf.path], "ext_metadata": extra}})
        keys = [{"key": key, "key_type": kind} for key, kind in leaf.keys]
        entries[str(tuple(key for key, _ in leaf.keys))] = {"key_metadata": keys, "value_metadata": value}
    tree = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    attempt.track_folder(item)
    attempt.write_file(f"{item}/{TREE_METADATA}", msgspec.json.encode(tree))
    structure = encode_aggregate((leaf.keys, _aggregate_value(leaf)) for leaf in leaves)
    attempt.write_file(f"{item}/{AGGREGATE}", structure)
    texts = {leaf.parameter: leaf.text for leaf in leaves if leaf.text is not None}
    if texts:
        attempt.write_file(f"{item}/{STRINGS}", msgspec.json.encode(texts))
    if arrays:
        shardings = {_base64(leaf.parameter): _ON_ONE_DEVICE for leaf in leaves if leaf.value_type == "jax.Array"}
        attempt.write_file(f"{item}/_sharding", msgspec.json.encode(shardings))
        attempt.add_folder(f"{item}/{ARRAY_METADATAS}")
        attempt.write_file(f"{item}/{ARRAY_METADATAS}/process_0", msgspec.json.encode({"array_metadatas": arrays}))


def _aggregate_value(leaf: _Leaf) -> Any:
    """Return the content of a leaf in the file `checkpoint`, which versions before 0.5 read."""
    if leaf.text is not None:
        return leaf.text
    if leaf.content is not None:
        return placeholder(leaf.parameter)
    return {"Dict": {}, "List": [], "Tuple": []}.get(leaf.value_type)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class ToWrite(NamedTuple):
    """The data of a leaf: its path, its name in the files, and its source, which is a stored array or a number."""

    path: str
    name: str
    content: ArrayRecord | np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype."""
        return DTYPES[self.content.dtype] if isinstance(self.content, ArrayRecord) else self.content.dtype

    @property
    def nbytes(self) -> int:
        """The uncompressed size."""
        return math.prod(self.content.shape) * self.dtype.itemsize


def write_arrays(
    directory: str,
    arrays: Iterable[ToWrite],
    *,
    subject: str,
    read: Callable[[ArrayRecord, Box], np.ndarray],
    compressed: bool,
    ahead_bytes: int,
    progress: ReadProgress | None,
) -> dict[str, list[int]]:
    """Write the data of all leaves.

    Args:
        directory: the directory of the item. All writes to it have ended when this function returns or raises.
        arrays: the data to write.
        subject: the checkpoint, for messages.
        read: reads a box of a stored array.
        compressed: compress with zstd.
        ahead_bytes: the limit of data held until it is written, in addition to the box being read.
        progress: called with the number of bytes of each write.

    Returns:
        The shapes of the chunks by leaf path.

    Raises:
        MismatchError: TensorStore does not support an array.
        SettingsError: TensorStore is not installed.
        StorageError: the file system reported an error.
    """
    ts = tensorstore("export: Orbax arrays are written")
    context = ts.Context({"file_io_concurrency": {"limit": 16}})
    shapes: dict[str, list[int]] = {}
    with _Writes(directory, ts.Transaction, ahead_bytes, progress) as writes:
        for array in arrays:
            boxes = list(cut_box(full_box(array.content.shape), array.dtype.itemsize, CHUNK_BYTES))
            shapes[array.path] = list(box_shape(boxes[0]))
            batch = writes.batch(array.nbytes)
            try:
                spec = _spec(directory, array, shapes[array.path], compressed)
                store = ts.open(spec, context=context, create=True, transaction=batch).result()
            except (ValueError, OSError) as error:
                problem = f"{subject}: leaf {array.path!r} of {array.dtype.name}: {shown(error)}"
                raise system_error(error, _WRITE, directory) or MismatchError(problem) from error
            for box in boxes:
                data = array.content if isinstance(array.content, np.ndarray) else read(array.content, box)
                part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
                if batch is not None:
                    _result(directory, part.write(data).copy)
                    continue
                writes.make_room(data.nbytes)
                writes.add(data.nbytes, data.nbytes, part.write(data).commit)
    return shapes


class _Writes:
    """The running writes of TensorStore. None of them is running after the block, even if it raises.

    Args:
        directory: the directory of the item, for messages.
        transaction: makes a new transaction of TensorStore.
        ahead_bytes: the limit of data held in memory.
        progress: called with the number of bytes of each finished write.
    """

    def __init__(
        self, directory: str, transaction: Callable[[], Any], ahead_bytes: int, progress: ReadProgress | None
    ) -> None:
        self._directory, self._transaction, self._progress = directory, transaction, progress
        self._waiting: collections.deque[tuple[int, int, Any]] = collections.deque()
        self._most = self._left = ahead_bytes
        self._batch_bytes = min(BATCH_BYTES, ahead_bytes // 4)
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

    def batch(self, nbytes: int) -> Any:
        """Return the transaction for an array of this size, and count the array. None: it is too large for a batch."""
        held = nbytes + _LEAF_BYTES
        if held > self._batch_bytes:
            return None
        if self._held_by_batch + held > self._batch_bytes:
            self._commit()
        self.make_room(held)
        if self._batch is None:
            self._batch = self._transaction()
        self._in_batch += nbytes
        self._held_by_batch += held
        self._left -= held
        return self._batch

    def make_room(self, nbytes: int) -> None:
        """Wait until this many more bytes can be held. Raises StorageError if a write has failed."""
        while self._left < min(self._most, nbytes):
            if not self._waiting:
                self._commit()
            self._settle_oldest()

    def add(self, held: int, nbytes: int, future: Any) -> None:
        """Add a running write of `nbytes` bytes, which holds `held` bytes of memory until it ends."""
        self._waiting.append((held, nbytes, future))
        self._left -= held

    def _commit(self) -> None:
        if self._batch is not None:
            self._left += self._held_by_batch
            self.add(self._held_by_batch, self._in_batch, self._batch.commit_async())
            self._batch, self._in_batch, self._held_by_batch = None, 0, 0

    def _settle_oldest(self) -> None:
        held, nbytes, future = self._waiting[0]
        _result(self._directory, future)
        self._waiting.popleft()
        self._left += held
        if self._progress is not None:
            self._progress(nbytes)


def _result(directory: str, future: Any) -> None:
    try:
        future.result()
    except (ValueError, OSError) as error:
        raise system_error(error, _WRITE, directory) or StorageError(
            errno.EIO, f"TensorStore: {shown(error)}", directory
        ) from error


def _spec(directory: str, array: ToWrite, chunk: Sequence[int], compressed: bool) -> dict[str, Any]:
    database = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "path": f"{array.name}/" if array.name else "",  # the name is empty if the tree is a single array
        "config": _DATABASE,
    }
    compressor = {"id": "zstd", "level": 1} if compressed else None
    metadata = {
        "shape": list(array.content.shape),
        "chunks": [max(1, size) for size in chunk],
        "compressor": compressor,
    }
    options = {"store_data_equal_to_fill_value": True, "dtype": array.dtype.name}
    return {"driver": "zarr", "kvstore": database, "metadata": metadata, **options}
