"""Reads msgpack files of Flax, as `flax.training.checkpoints` and `flax.serialization.to_bytes` write them."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator
from typing import Any, cast

from jaxckpt_train.checkpointables.saving import CheckpointSave, PathTarget
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError, UnsupportedLeafError
from jaxckpt_train.formats.step_folders import ARRAYS_OF_A_JOB, FlaxFile
from jaxckpt_train.pytree.paths import MAX_DEPTH
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.backends.memory import MemoryBackend
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.files import SNIFFED_BYTES, other_content, read_whole
from jaxckpt_train.store.process_identity import memory_bytes
from jaxckpt_train.store.transaction import Transaction

_NAME = "state"
_PLACEHOLDER = "//GDAPlaceholder:"
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})", re.DOTALL)
_MOST_NAMED = 5


def open_flax_file(backend: Backend, found: FlaxFile, settings: StoreSettings) -> tuple[MemoryBackend, Committed]:
    """Load a Flax msgpack file, and return it as an in-memory checkpoint of the pytree `state` at the same path.

    Args:
        backend: the storage of the file.
        found: the file.
        settings: the settings for reading.

    Raises:
        NotACheckpointError: the file is not a Flax msgpack file, or Flax is not installed.
        CorruptCheckpointError: the file does not hold a tree of arrays, or it is not msgpack although it is a
            checkpoint in a directory of Flax.
        UnsupportedLeafError: some of its arrays belong to several processes and are stored elsewhere.
        StorageError: the file cannot be read, or does not fit into memory.
    """
    tree, path = _restore(backend, found), found.path
    _refuse_arrays_elsewhere(tree, path)
    # Non-finite values are the user's own, already saved: the policy for new saves does not apply.
    memory, plain = MemoryBackend(), dataclasses.replace(settings, nonfinite="allow")
    memory.make_directory(path.rpartition("/")[0] or "/", parents=True, sync=False)
    step = _STEP.fullmatch(path.rpartition("/")[2])
    info = {} if step is None else {"step": int(step[1])}
    target = PathTarget(memory, path, plain, info, transaction=Transaction(memory, path, plain))
    save = CheckpointSave(Coordinator(), path, memory, plain)
    save.stage({_NAME: tree})
    return memory, save.run(target)


def _restore(backend: Backend, found: FlaxFile) -> Any:
    folder, _, name = found.path.rpartition("/")
    data = cast("bytes", memoryview(read_whole(backend, folder, name, limit=None)))  # msgpack takes any buffer
    try:
        from flax import serialization
    except ImportError as error:
        raise NotACheckpointError(
            f"{found.path}: expected a checkpoint directory, found a file; if Flax wrote it, install Flax to read it"
        ) from error
    if not len(data):
        raise _not_flax_error(found, "it is empty, perhaps after a full disk or a crash")
    try:
        tree = serialization.msgpack_restore(data)
    except MemoryError as error:
        raise StorageError(
            errno.ENOMEM,
            f"decoding needs twice its {len(data)} bytes, but this machine has {memory_bytes()} bytes of memory",
            found.path,
        ) from error
    except Exception as error:  # the parser trusts the dtypes, shapes and lengths in the file, so it may raise anything
        other = other_content(bytes(data[:SNIFFED_BYTES]))
        raise _not_flax_error(found, other or f"{type(error).__name__}: {error}") from error
    if not isinstance(tree, dict):
        raise CorruptCheckpointError(
            f"{found.path}: expected a Flax msgpack file of a map, found one of a {type(tree).__name__}"
        )
    return _with_lists(tree, found.path)


def _not_flax_error(found: FlaxFile, why: str) -> NotACheckpointError | CorruptCheckpointError:
    """Return the error for a file that is not msgpack.

    It is damage if the file is a checkpoint in a directory of Flax.
    """
    if found.directory is not None:
        return CorruptCheckpointError(f"{found.path}: expected a Flax msgpack file, found another content ({why})")
    expected = f"{found.path}: expected a checkpoint directory or a Flax msgpack file"
    if found.path.endswith(".json"):
        folder = found.path.rpartition("/")[0] or "/"
        return NotACheckpointError(f"{expected}, found a JSON file; pass the directory of the checkpoint, {folder}")
    return NotACheckpointError(f"{expected}, found another file ({why})")


def _refuse_arrays_elsewhere(tree: Any, path: str) -> None:
    """Raise UnsupportedLeafError if Flax has saved arrays of several processes in a directory next to the file."""
    names = list(_names_of_arrays_elsewhere(tree))
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise UnsupportedLeafError(
            f"{path}: cannot read {', '.join(map(repr, names[:_MOST_NAMED]))}{more}: Flax has saved these arrays of "
            f"several processes in {path}{ARRAYS_OF_A_JOB}; restore them with Flax in a job with the same number of "
            "processes, and save the state with jaxckpt_train"
        )


def _names_of_arrays_elsewhere(node: Any) -> Iterator[str]:
    """Yield the path in each placeholder that Flax writes for an array of several processes."""
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _names_of_arrays_elsewhere(child)
    elif isinstance(node, str) and node.startswith(_PLACEHOLDER):
        yield node.removeprefix(_PLACEHOLDER)


def _with_lists(node: Any, path: str, depth: int = 0) -> Any:
    """Turn each map with the keys "0", "1", ... back into a list. Flax writes lists and tuples as such maps."""
    if not isinstance(node, (dict, list)):
        return node
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(
            f"{path}: expected at most {MAX_DEPTH} levels in the Flax msgpack file, found more"
        )
    if isinstance(node, list):
        return [_with_lists(child, path, depth + 1) for child in node]
    try:
        # JAX would raise the same error later, but every such error permanently lowers the thread's recursion limit.
        sorted(node)
    except TypeError as error:
        raise CorruptCheckpointError(
            f"{path}: expected map keys of one type in the Flax msgpack file, found several: {error}"
        ) from error
    children = {key: _with_lists(child, path, depth + 1) for key, child in node.items()}
    if children and set(children) == {str(number) for number in range(len(children))}:
        return [children[str(number)] for number in range(len(children))]
    return children
