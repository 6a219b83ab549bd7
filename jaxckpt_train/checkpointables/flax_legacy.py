"""Reads the msgpack files that Flax wrote before it had Orbax (`flax.training.checkpoints`, `to_bytes`)."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any, cast

from jaxckpt_train.checkpointables.saving import SaveTimes, stage_all, write_parts
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.pending import Movement
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.machine import memory_bytes
from jaxckpt_train.store.memory import MemoryBackend
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.store.transaction import Committed, Transaction
from jaxckpt_train.tree.paths import MAX_DEPTH

_NAME = "state"


def open_flax_file(backend: Backend, path: str, settings: StoreSettings) -> tuple[MemoryBackend, Committed]:
    """Open a Flax msgpack file as if it were a checkpoint with one pytree, `state`: in memory.

    Args:
        backend: where.
        path: of the file.
        settings: how it is going to be read.

    Raises:
        NotACheckpointError: the file is not of this form, or Flax is not installed to read it.
        CorruptCheckpointError: it is, and holds what no tree of arrays is.
        StorageError: it cannot be read, or does not fit into memory.
    """
    tree = _restore(backend, path)
    memory, plain = MemoryBackend(), dataclasses.replace(settings, nonfinite="allow")  # nothing of the user's is saved
    transaction = Transaction(memory, "/flax", plain)
    parts = stage_all({_NAME: tree}, SaveTimes(), plain)
    return memory, write_parts(transaction, memory, parts, {}, plain, SaveTimes(), replace=False, progress=Movement())


def _restore(backend: Backend, path: str) -> Any:
    folder, _, name = path.rpartition("/")
    data = cast("bytes", memoryview(read_whole(backend, folder, name, limit=None)))  # msgpack takes any buffer
    try:
        from flax import serialization
    except ImportError as error:
        raise NotACheckpointError(
            f"{path}: expected a checkpoint directory, found a file; if Flax wrote it, install Flax to read it"
        ) from error
    try:
        tree = serialization.msgpack_restore(data)
    except MemoryError as error:
        there = f"this machine has {memory_bytes()}"
        raise StorageError(
            errno.ENOMEM, f"its {len(data)} bytes do not fit into memory twice: {there}", path
        ) from error
    except Exception as error:  # a foreign parser: it believes the file's dtypes, shapes and lengths
        raise NotACheckpointError(
            f"{path}: expected a checkpoint directory or a Flax msgpack file, found a file that is neither "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(tree, dict):
        raise CorruptCheckpointError(f"{path}: a Flax msgpack file of a {type(tree).__name__}, expected a map")
    return _with_positions(tree, path)


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
