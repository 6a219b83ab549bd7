"""Plain files of a checkpoint, beside its segments: read whole, or digested block by block."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import MISSING, Backend, Source
from jaxckpt_train.store.digests import block_digests, digest_function
from jaxckpt_train.store.manifest import BLOCK_BYTES, FileRecord


def file_record(
    backend: Backend, directory: str, name: str, digest_name: str, progress: Callable[[int], None]
) -> FileRecord:
    """What the manifest says of a file that is there, read block by block: nobody knows how large it is.

    `progress` is told of each block.
    """
    digest, digests = digest_function(digest_name), list[str]()
    source: Source = backend.open(directory, name, direct=False)
    try:
        memory = np.empty(min(source.size, BLOCK_BYTES), np.uint8)
        for at in range(0, source.size, BLOCK_BYTES):
            block = memory[: min(BLOCK_BYTES, source.size - at)]
            source.read_into(at, block, len(block))
            digests.append(digest(memoryview(block)))
            progress(len(block))
        return FileRecord(name, source.size, "".join(digests))
    finally:
        source.close()


def read_whole(backend: Backend, directory: str, name: str, limit: int | None) -> np.ndarray:
    """All bytes of a file below a directory, as a flat uint8 array.

    Raises:
        CorruptCheckpointError: it is larger than `limit` bytes.
        StorageError: it is not there or cannot be read.
    """
    source: Source = backend.open(directory, name, direct=False)
    try:
        if limit is not None and source.size > limit:
            raise CorruptCheckpointError(f"{directory}/{name}: {source.size} bytes, expected at most {limit}")
        data = np.empty(source.size, np.uint8)
        source.read_into(0, data, len(data))
    finally:
        source.close()
    return data


def read_or_none(
    backend: Backend, directory: str, name: str, limit: int, *, size: int | None = None
) -> bytes | bytearray | None:
    """All bytes of a small file of a checkpoint, once in memory; None: there is none.

    Args:
        backend: where.
        directory: the checkpoint.
        name: of the file.
        limit: how many bytes it may have.
        size: how many COMMIT says that it has; None: it does not say.

    Raises:
        CorruptCheckpointError: something else than a file is in its place, or one of another size, which is not read.
        StorageError: the storage refused for a reason that is not the checkpoint's fault.
    """
    try:
        source: Source = backend.open(directory, name, direct=False)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        if error.errno in MISSING:
            raise CorruptCheckpointError(f"{directory}/{name}: expected a file, but: {error}") from error
        raise
    try:
        if source.size > limit:
            raise CorruptCheckpointError(f"{directory}/{name}: {source.size} bytes, expected at most {limit}")
        if size is not None and source.size != size:
            raise CorruptCheckpointError(f"{directory}/{name}: {source.size} bytes, but COMMIT says {size}")
        data = bytearray(source.size)
        source.read_into(0, np.frombuffer(data, np.uint8), len(data))
    finally:
        source.close()
    return data


def open_recorded(
    backend: Backend,
    directory: str,
    name: str,
    size: int,
    *,
    direct: bool | Literal["auto"] = False,
    subject: str = "file",
) -> Source:
    """Open a file that the manifest names.

    Raises:
        CorruptCheckpointError: it is missing, no plain file, or of another size than the manifest says.
        StorageError: the storage refused for a reason that is not the checkpoint's fault.
    """
    path = f"{directory}/{name}"
    try:
        source: Source = backend.open(directory, name, direct=direct)
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        raise CorruptCheckpointError(f"{path}: the manifest names this {subject}, but: {error}") from error
    if source.size != size:
        source.close()
        raise CorruptCheckpointError(f"{path}: {source.size} bytes, but the manifest says {size}")
    return source


def read_recorded(
    backend: Backend, directory: str, record: FileRecord, digest_name: str | None, block_bytes: int
) -> np.ndarray:
    """All bytes of a file that the manifest names, compared with what it says of them; None: only with their number.

    Raises:
        CorruptCheckpointError: it is not what was saved.
        StorageError: it cannot be read.
    """
    source = open_recorded(backend, directory, record.file, record.bytes)
    try:
        data = np.empty(source.size, np.uint8)
        source.read_into(0, data, len(data))
    finally:
        source.close()
    if digest_name is not None and block_digests(data, block_bytes, digest_function(digest_name)) != record.digests:
        path = f"{directory}/{record.file}"
        raise CorruptCheckpointError(f"{path}: bytes 0 to {len(data)} are not what was saved ({digest_name} differs)")
    return data
