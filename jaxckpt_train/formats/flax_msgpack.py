"""Reads the msgpack files that Flax wrote before it had Orbax (`flax.training.checkpoints`, `to_bytes`)."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator
from typing import Any, cast

from jaxckpt_train.checkpointables.saving import SaveTimes, stage_all, write_parts
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError, UnsupportedLeafError
from jaxckpt_train.formats.flax import ARRAYS_OF_A_JOB, FlaxFile
from jaxckpt_train.pending import ProgressTracker
from jaxckpt_train.pytree.flatten import MAX_DEPTH
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
    """Open a Flax msgpack file as if it were a checkpoint with one pytree, `state`: in memory, at the same path.

    Args:
        backend: where.
        found: the file.
        settings: how it is going to be read.

    Raises:
        NotACheckpointError: the file is not of this form, or Flax is not installed to read it.
        CorruptCheckpointError: it is, and holds what no tree of arrays is; or lies among those of Flax, and is not.
        UnsupportedLeafError: some of its arrays are those of several processes, which lie elsewhere.
        StorageError: it cannot be read, or does not fit into memory.
    """
    tree, path = _restore(backend, found), found.path
    _refuse_arrays_elsewhere(tree, path)
    memory, plain = MemoryBackend(), dataclasses.replace(settings, nonfinite="allow")  # nothing of the user's is saved
    memory.make_directory(path.rpartition("/")[0] or "/", parents=True, sync=False)
    transaction = Transaction(memory, path, plain)
    parts = stage_all({_NAME: tree}, SaveTimes(), plain)
    step = _STEP.fullmatch(path.rpartition("/")[2])
    info = {} if step is None else {"step": int(step[1])}
    return memory, write_parts(
        transaction, memory, parts, info, plain, SaveTimes(), replace=False, progress=ProgressTracker()
    )


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
        raise _no_flax_file(found, "it is empty, as a full disk or a crash leaves it")
    try:
        tree = serialization.msgpack_restore(data)
    except MemoryError as error:
        there = f"this machine has {memory_bytes()}"
        raise StorageError(
            errno.ENOMEM, f"its {len(data)} bytes do not fit into memory twice: {there}", found.path
        ) from error
    except Exception as error:  # a foreign parser: it believes the file's dtypes, shapes and lengths
        other = other_content(bytes(data[:SNIFFED_BYTES]))
        raise _no_flax_file(found, other or f"{type(error).__name__}: {error}") from error
    if not isinstance(tree, dict):
        raise CorruptCheckpointError(f"{found.path}: a Flax msgpack file of a {type(tree).__name__}, expected a map")
    return _with_positions(tree, found.path)


def _no_flax_file(found: FlaxFile, why: str) -> NotACheckpointError | CorruptCheckpointError:
    """The error of a file that is none; among those of Flax it was one."""
    if found.directory is not None:
        return CorruptCheckpointError(f"{found.path}: expected a Flax msgpack file, found one that is none ({why})")
    expected = f"{found.path}: expected a checkpoint directory or a Flax msgpack file"
    if found.path.endswith(".json"):
        folder = found.path.rpartition("/")[0] or "/"
        return NotACheckpointError(
            f"{expected}, found a JSON file; of a checkpoint or a model give the folder, {folder}"
        )
    return NotACheckpointError(f"{expected}, found a file that is neither ({why})")


def _refuse_arrays_elsewhere(tree: Any, path: str) -> None:
    """Raise UnsupportedLeafError if Flax has put arrays of several processes into a directory beside the file."""
    names = list(_elsewhere(tree))
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise UnsupportedLeafError(
            f"{path}: {', '.join(map(repr, names[:_MOST_NAMED]))}{more}: arrays of several processes, which Flax has "
            f"saved in {path}{ARRAYS_OF_A_JOB} and which are not read here; restore them with Flax, in a job of as "
            "many processes, and save the state here"
        )


def _elsewhere(node: Any) -> Iterator[str]:
    """What stands for such an array, with its path."""
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _elsewhere(child)
    elif isinstance(node, str) and node.startswith(_PLACEHOLDER):
        yield node.removeprefix(_PLACEHOLDER)


def _with_positions(node: Any, path: str, depth: int = 0) -> Any:
    """Flax writes a list or tuple as a map of "0", "1", ...: its keys become the positions that they stand for."""
    if not isinstance(node, (dict, list)):
        return node
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: a Flax msgpack file of more than {MAX_DEPTH} levels, expected fewer")
    if isinstance(node, list):
        return [_with_positions(child, path, depth + 1) for child in node]
    try:
        sorted(node)
    except TypeError as error:  # JAX finds out too, but each time leaves one call less of those that a thread may nest
        raise CorruptCheckpointError(
            f"{path}: a Flax msgpack file with a map whose keys differ in kind: {error}"
        ) from error
    children = {key: _with_positions(child, path, depth + 1) for key, child in node.items()}
    if children and set(children) == {str(number) for number in range(len(children))}:
        return [children[str(number)] for number in range(len(children))]
    return children
