"""Refuses what TensorStore would end the process for: files and chunks larger than they can be, or than memory is."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Collection, Iterator
from typing import Any

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.formats.orbax_looks import OCDBT
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.machine import memory_bytes

MOST_METADATA_BYTES = 64 << 20  # of a file that says what an array, or a database, is like
MORE_STORED = 1 << 20  # than a chunk has bytes: what does not compress, with its head
LARGE_CHUNK_BYTES = 1 << 30  # a smaller one may be larger than its array


def check_metadata(
    files: Backend, directory: str, folders: Collection[str], *, use_ocdbt: bool, use_zarr3: bool
) -> None:
    """Refuse metadata that is too large, which is read as soon as an array is opened.

    Args:
        files: where.
        directory: of the item.
        folders: those of its arrays, where they are files, and those with a database of their own.
        use_ocdbt: whether the item has a database.
        use_zarr3: the version of zarr.

    Raises:
        CorruptCheckpointError: some is.
    """
    name_there = OCDBT if use_ocdbt else "zarr.json" if use_zarr3 else ".zarray"
    names = [OCDBT] if use_ocdbt else []
    for name in names + [f"{folder}/{name_there}" if folder else name_there for folder in folders]:
        size = _size(files, directory, name)
        if size > MOST_METADATA_BYTES:
            raise CorruptCheckpointError(
                f"{directory}/{name}: {size:,} bytes, expected at most {MOST_METADATA_BYTES:,} of metadata"
            )


def _size(files: Backend, directory: str, name: str) -> int:
    """How large a file is; 0: there is none that can be read, which TensorStore tells of."""
    try:
        source = files.open(directory, name, direct=False)
    except (StorageError, CorruptCheckpointError):
        return 0
    try:
        return source.size
    finally:
        source.close()


def chunk_shape(store: Any, *, is_stored: bool = False) -> list[int]:
    """What is decoded together, or stored together; all of an array that has no chunks."""
    layout = store.chunk_layout
    chunk = (layout.write_chunk if is_stored else layout.read_chunk).shape or store.shape
    return [size or whole for size, whole in zip(chunk, store.shape, strict=True)]


def chunk_bytes(store: Any, *, is_stored: bool = False) -> int:
    """Size of that, as it is decoded."""
    return math.prod(chunk_shape(store, is_stored=is_stored)) * int(store.dtype.numpy_dtype.itemsize)


class Bounds:
    """Of the chunks of an array, which are looked at once, before the first is read.

    Args:
        files: where; None: it lies in a database, which has digests of what it tells about sizes.
        directory: of the item.
        folder: of the array in it.
        subject: the array, for messages.
        store: the array, of TensorStore.
    """

    def __init__(self, files: Backend | None, directory: str, folder: str, subject: str, store: Any) -> None:
        self._files, self._directory, self._folder, self._subject = files, directory, folder, subject
        self._store = store
        self._is_checked, self._lock = False, threading.Lock()

    def check(self) -> None:
        """Refuse what cannot be read.

        Raises:
            CorruptCheckpointError: a chunk has more bytes than it can have.
            StorageError: a chunk does not fit into memory.
        """
        with self._lock:
            if not self._is_checked:
                self._check_chunks()
                self._check_files()
                self._is_checked = True

    def _check_chunks(self) -> None:
        size = chunk_bytes(self._store)
        array_bytes = math.prod(self._store.shape) * int(self._store.dtype.numpy_dtype.itemsize)
        if size > max(LARGE_CHUNK_BYTES, array_bytes):
            raise CorruptCheckpointError(
                f"{self._subject}: its chunks are of {size:,} bytes, expected at most its own {array_bytes:,}"
            )
        if 2 * size > memory_bytes():
            raise StorageError(
                errno.ENOMEM,
                f"{self._subject}: a chunk of {size:,} bytes does not fit into memory twice, as it is "
                f"stored and as it is decoded: this machine has {memory_bytes():,}",
            )

    def _check_files(self) -> None:
        if self._files is None:
            return
        stored = chunk_bytes(self._store, is_stored=True)
        most = stored + (stored >> 3) + MORE_STORED
        for name in _chunk_files(self._files, self._directory, self._folder):
            size = _size(self._files, self._directory, name)
            if size > most:
                raise CorruptCheckpointError(
                    f"{self._subject}: {self._directory}/{name}: {size:,} bytes, expected at most {most:,} of a chunk "
                    f"of {stored:,}"
                )


def _chunk_files(files: Backend, directory: str, folder: str) -> Iterator[str]:
    """The files of an array's chunks: named by numbers, with dots or folders between them, in zarr 3 after a `c`."""
    try:
        entries = files.list(f"{directory}/{folder}" if folder else directory)
    except StorageError:  # told by whoever reads it
        return
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name[0].isdigit() or entry.name == "c" or entry.name.startswith("c."):
            if entry.kind == "directory":
                yield from _chunk_files(files, directory, name)
            else:
                yield name
