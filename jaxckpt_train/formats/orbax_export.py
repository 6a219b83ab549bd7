"""Writes trees and values as a step that Orbax restores, by either of its interfaces."""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.formats.orbax_aggregate import encode_aggregate, placeholder
from jaxckpt_train.formats.orbax_checkpoint import METRICS
from jaxckpt_train.formats.orbax_looks import AGGREGATE, STEP_METADATA
from jaxckpt_train.formats.orbax_metadata import ARRAY_METADATAS, STRINGS, TREE_METADATA, VALUE
from jaxckpt_train.formats.orbax_writes import AHEAD_BYTES, ToWrite, write_arrays
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.appearing import appearing
from jaxckpt_train.store.attempt import Attempt
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.box_to_come import BoxToCome
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord, is_plain_name, what_is_a_plain_name
from jaxckpt_train.store.plain_files import read_recorded
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.stored_metrics import metrics_from_json
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.leaf_records import (
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
from jaxckpt_train.tree.paths import ROOT, parse_key, split

MAX_RANK = 32  # TensorStore's
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREES, _VALUES = (
    f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
)
_NUMBERS = (BoolLeaf, IntLeaf, FloatLeaf)
_ON_ONE_DEVICE = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
_EMPTY = {"list": "List", "tuple": "Tuple", "dict": "Dict"}


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
    progress: Progress | None = None,
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
    return BoxToCome(files, committed, array, box, settings).fetch()


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
