"""Writes trees and values as a step that Orbax restores, by either of its interfaces.

Writes arrays as Orbax has them, through TensorStore: many small ones together, large ones in pieces.
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
from jaxckpt_train.formats.tensorstore_reads import refused, tensorstore
from jaxckpt_train.pytree.flatten import ROOT, parse_key, split
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
    shown,
    what_is_a_plain_name,
)
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.transaction import Attempt, appearing

CHUNK_BYTES = 64 << 20
AHEAD_BYTES = 256 << 20
"""So much of the arrays is on its way to the disk at a time."""
BATCH_BYTES = 16 << 20
"""So much of small arrays becomes one commit. One of each would be files and a rewritten index of its own."""
_LEAF_BYTES = 4 << 10  # what a batch holds of each array beside its data, about
_WRITE = "write through TensorStore"
# TensorStore's own settings for a database that one process writes at a time, as Orbax has them.
_DATABASE = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
MAX_RANK = 32  # TensorStore's
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREES, _VALUES = (
    f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
)
_NUMBERS = (BoolLeaf, IntLeaf, FloatLeaf)
_ON_ONE_DEVICE = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
_EMPTY = {"list": "List", "tuple": "Tuple", "dict": "Dict"}


class ToWrite(NamedTuple):
    """The data of a leaf: its path, its name in the files, and what it is read from: an array, or a number."""

    path: str
    name: str
    content: ArrayRecord | np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Of numpy."""
        return DTYPES[self.content.dtype] if isinstance(self.content, ArrayRecord) else self.content.dtype

    @property
    def nbytes(self) -> int:
        """Uncompressed."""
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
        directory: of the item; when this returns or raises, nothing is written into it any more.
        arrays: what to write.
        subject: the checkpoint, for errors.
        read: gives a piece of an array.
        compressed: by zstd.
        ahead_bytes: at most so much is held that is not on the disk yet, beside the piece that is read.
        progress: called with numbers of bytes as they are written.

    Returns:
        The shapes of the chunks by leaf path.

    Raises:
        MismatchError: TensorStore has nothing for such an array.
        SettingsError: TensorStore is not installed.
        StorageError: the file system refused.
    """
    ts = tensorstore("export: what Orbax reads is written")
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
                told = f"{subject}: leaf {array.path!r} of {array.dtype.name}: {shown(error)}"
                raise refused(error, _WRITE, directory) or MismatchError(told) from error
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
    """Writes of TensorStore that are on their way; at the end, also by an error, none is.

    Args:
        directory: what is written into, for errors.
        transaction: makes a new transaction of TensorStore.
        ahead_bytes: so much is held at a time.
        progress: is told of what was written.
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
        finally:  # after an error: what is still written would come into a directory that is being removed
            if self._batch is not None:
                self._batch.abort()
            for *_, future in self._waiting:
                future.exception()

    def batch(self, nbytes: int) -> Any:
        """The transaction into which an array of so many bytes goes, at once; None: it is too large for one."""
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
        """Wait until so many bytes more may be held; raises StorageError if a write has failed."""
        while self._left < min(self._most, nbytes):
            if not self._waiting:
                self._commit()
            self._settle_oldest()

    def add(self, held: int, nbytes: int, future: Any) -> None:
        """A write of so many bytes has begun, for which so many are held until it has ended."""
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
        raise refused(error, _WRITE, directory) or StorageError(
            errno.EIO, f"TensorStore: {shown(error)}", directory
        ) from error


def _spec(directory: str, array: ToWrite, chunk: Sequence[int], compressed: bool) -> dict[str, Any]:
    database = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "path": f"{array.name}/" if array.name else "",  # a tree that is one array
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


class _Leaf(NamedTuple):
    """A leaf to write: its name in Orbax's files, what it is to Orbax, and its data, if it has some."""

    path: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    content: ArrayRecord | np.ndarray | None = None
    text: str | None = None
    implementation: str | None = None

    @property
    def parameter(self) -> str:
        return ".".join(key for key, _ in self.keys)


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
    """Write a checkpoint as a step of Orbax: an item for each checkpointable.

    Args:
        files: what the checkpoint is read from.
        committed: the opened checkpoint.
        backend: where to write; on a local file system.
        final: the directory of the step, an absolute path where nothing is.
        settings: how the checkpoint is verified, and how durable the step is made.
        parts: names of the checkpointables; None: all.
        items: other names for some of them, such as `{"state": "default"}`.
        compressed: by zstd, as Orbax does by default.
        progress: called with numbers of bytes as they are written.

    Returns:
        The names of the items.

    Raises:
        MismatchError: a leaf or checkpointable is of a kind that Orbax has nothing for.
        SettingsError: an item cannot have such a name, or TensorStore is not installed.
        CheckpointExistsError: something is at `final`.
        CorruptCheckpointError: bytes of the checkpoint are not what was saved.
        StorageError: the file system refused.
    """
    chosen = [part for part in committed.manifest.parts if parts is None or part.name in parts]
    names = _item_names([part.name for part in chosen], items or {})
    trees = {part.name: _leaves(committed, part) for part in chosen if has_tree(part)}
    others = [part for part in chosen if part.name not in trees]
    for part in others:
        if part.kind != "json" or len(part.files) != 1:
            raise MismatchError(
                f"{committed.directory}: {part.name!r} is of kind {part.kind!r}, which Orbax has nothing for; leave it "
                "out"
            )
    write = functools.partial(
        write_arrays,
        subject=committed.directory,
        read=functools.partial(_read, files, committed, settings),
        compressed=compressed,
        ahead_bytes=min(AHEAD_BYTES, settings.read_budget_bytes),
        progress=progress,
    )
    began = time.time_ns()
    with appearing(backend, final, settings) as attempt:
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
        attempt.write_file(STEP_METADATA, _step_metadata(committed, handlers, began))
    return tuple(names.values())


def _item_names(parts: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for part in parts:
        name = given.get(part, part)
        if part in given and (not isinstance(name, str) or not is_plain_name(name) or name in (METRICS, STEP_METADATA)):
            expected = f"the name of a folder ({what_is_a_plain_name()}, {METRICS}, {STEP_METADATA})"
            raise SettingsError(f"export: the item of {part!r}: expected {expected}, found {name!r}")
        if name in names.values():
            raise SettingsError(f"export: expected a name of its own for each item, found {name!r} for two")
        names[part] = name
    return names


def _write_metrics(attempt: Attempt, metrics: Mapping[str, float]) -> None:
    """As the item that Orbax has for them, in the JSON of Python, which has names for nan and inf."""
    attempt.add_folder(METRICS)
    attempt.write_file(f"{METRICS}/{METRICS}", json.dumps(metrics).encode())


def is_nnx_state(part: PartRecord, subject: str) -> bool:
    """Whether a tree has state of Flax NNX that Orbax restores as nested dicts only.

    In a target of `nnx.state` each variable is to Orbax a container with one leaf, `value`. A checkpoint does not
    say which leaves were variables: an operation names them.
    """
    tree = decode_tree(part, subject)
    has_states = any(container.startswith("object flax.nnx.") for container in tree.containers.values())
    return has_states and not any(name.endswith(VALUE) for name in tree.leaves)


def _step_metadata(committed: Committed, handlers: Mapping[str, str], began: int) -> bytes:
    custom = committed.manifest.info.get("custom_metadata")
    return msgspec.json.encode(
        {
            "item_handlers": dict(handlers),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": began,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": custom if isinstance(custom, Mapping) else {},
        }
    )


def _leaves(committed: Committed, part: PartRecord) -> list[_Leaf]:
    record = decode_tree(part, committed.directory)
    arrays = {array.name: array for array in part.arrays}
    found = [_leaf(committed.directory, record, name, leaf, arrays.get(name)) for name, leaf in record.leaves.items()]
    seen: dict[str, str] = {}
    for each in found:
        if seen.setdefault(each.parameter, each.path) != each.path:
            raise MismatchError(
                f"{committed.directory}: leaves {seen[each.parameter]!r} and {each.path!r} would both be called "
                f"{each.parameter!r} by Orbax; rename one"
            )
    return found


def _leaf(subject: str, tree: TreeRecord, path: str, leaf: LeafRecord, array: ArrayRecord | None) -> _Leaf:
    keys = _keys(tree, path)
    if array is not None:
        if len(array.shape) > MAX_RANK:
            raise MismatchError(
                f"{subject}: leaf {path!r} has {len(array.shape)} axes, of which Orbax has {MAX_RANK} at most; "
                "give it another shape (the operation reshape)"
            )
        if isinstance(leaf, KeyLeaf):
            return _Leaf(path, keys, "jax.Array", array, implementation=leaf.impl)
        # Not as an array of JAX: who restores it without a target would need the devices that it was on.
        return _Leaf(path, keys, "np.ndarray", array)
    if isinstance(leaf, NoneLeaf | EmptyLeaf) and not keys:
        raise MismatchError(f"{subject}: a tree without leaves, which Orbax has nothing for: it saves none either")
    if isinstance(leaf, NoneLeaf):
        return _Leaf(path, keys, "None")
    if isinstance(leaf, EmptyLeaf):
        kind = tree.containers.get(path, "dict").partition(" ")[0]
        return _Leaf(path, keys, _EMPTY.get(kind, "None"))  # a NamedTuple without fields is None to Orbax
    value = python_value(path, leaf, subject)
    if isinstance(leaf, StrLeaf):
        return _Leaf(path, keys, "string", text=value)
    if isinstance(leaf, ComplexLeaf):  # none of Orbax's numbers: it would refuse to restore the whole item
        return _Leaf(path, keys, "np.ndarray", np.asarray(value))
    if not isinstance(leaf, _NUMBERS) or (isinstance(leaf, IntLeaf) and not -(2**63) <= value < 2**63):
        raise MismatchError(
            f"{subject}: leaf {path!r}: {'an integer beyond 64 bits' if isinstance(leaf, IntLeaf) else 'bytes'}, which "
            "Orbax has nothing for; leave it out (the operation drop)"
        )
    return _Leaf(path, keys, "scalar", np.asarray(value))


def _keys(tree: TreeRecord, path: str) -> tuple[tuple[str, int], ...]:
    keys, found = split(path), []
    for depth, key in enumerate(keys):
        container = tree.containers.get("/".join(keys[:depth]) or ROOT, "dict").partition(" ")[0]
        found.append((str(parse_key(key)), 1 if container in ("list", "tuple") else 2))
    return tuple(found)


def _read(files: Opener, committed: Committed, settings: StoreSettings, array: ArrayRecord, box: Box) -> np.ndarray:
    return LazyBox(files, committed, array, box, settings).fetch()


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
    attempt.take_in(item)
    attempt.write_file(f"{item}/{TREE_METADATA}", msgspec.json.encode(tree))
    structure = encode_aggregate((leaf.keys, _in_structure(leaf)) for leaf in leaves)
    attempt.write_file(f"{item}/{AGGREGATE}", structure)
    texts = {leaf.parameter: leaf.text for leaf in leaves if leaf.text is not None}
    if texts:
        attempt.write_file(f"{item}/{STRINGS}", msgspec.json.encode(texts))
    if arrays:
        shardings = {_in_base64(leaf.parameter): _ON_ONE_DEVICE for leaf in leaves if leaf.value_type == "jax.Array"}
        attempt.write_file(f"{item}/_sharding", msgspec.json.encode(shardings))
        attempt.add_folder(f"{item}/{ARRAY_METADATAS}")
        attempt.write_file(f"{item}/{ARRAY_METADATAS}/process_0", msgspec.json.encode({"array_metadatas": arrays}))


def _in_structure(leaf: _Leaf) -> Any:
    """What versions before 0.5 find of a leaf in the file with the structure."""
    if leaf.text is not None:
        return leaf.text
    if leaf.content is not None:
        return placeholder(leaf.parameter)
    return {"Dict": {}, "List": [], "Tuple": []}.get(leaf.value_type)


def _in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
