"""Reads arrays of Orbax items with TensorStore: zarr of both versions, in an OCDBT database or in plain files.

TensorStore aborts the process when it runs out of memory, so sizes are checked before it reads anything.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.formats.foreign import PieceCache, Segments, array_record, check_shape, foreign_call, grid_boxes
from jaxckpt_train.formats.orbax_names import OCDBT, ZARR
from jaxckpt_train.store.backends.base import MISSING, Backend, objects_of, storage_error
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.manifest import ArrayRecord, shown
from jaxckpt_train.store.process_identity import memory_bytes
from jaxckpt_train.store.segment import dtype_name, is_storable

if TYPE_CHECKING:
    import tensorstore as ts

MAX_ERROR_CHARACTERS = 2000  # of a message of TensorStore, which contains a path
OPEN_AT_ONCE = 256
LEAST_CHUNK_BYTES = 4 << 20  # smaller chunks are read together
MOST_PIECES = 1 << 20  # of an array, each of which has a record: 4 TiB in the smallest pieces
DECODING = 2  # reading a chunk needs twice its size: its stored bytes and its elements
CACHED_BYTES = 100 << 20  # nodes of OCDBT databases
MOST_METADATA_BYTES = 64 << 20  # of the metadata file of an array or a database
MORE_STORED = 1 << 20  # the largest excess of a stored chunk over its decoded size, for its header
LARGE_CHUNK_BYTES = 1 << 30  # a chunk up to this size may be larger than its array
_SYSTEM_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")  # in messages of different versions
# What object stores answer that says nothing about the data.
_REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_NETWORK_ERROR = re.compile(rf"({'|'.join(_REFUSED)}|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED): ")
_STARTED = "/tensorstore/thread_pool/started"  # TensorStore's count of the threads started in this process
_OF_THE_NAME = MISSING | {errno.ENAMETOOLONG}  # no file can have this name, so the metadata with the name is damaged
_threads_of: int | None = None  # the process that was forked after TensorStore had started threads in it


def _look_for_threads() -> None:
    """Record before a fork whether TensorStore has threads, which the child process will not have."""
    global _threads_of
    library = sys.modules.get("tensorstore")
    count = getattr(library, "experimental_collect_matching_metrics", None)
    if _threads_of is None and library is not None and (count is None or count(_STARTED)):
        _threads_of = os.getpid()


os.register_at_fork(before=_look_for_threads)


def refuse_fork(subject: str) -> None:
    """Raise SettingsError in a process that was forked after TensorStore had started threads, where it would abort."""
    if _threads_of not in (None, os.getpid()):
        raise SettingsError(
            f"{subject} through TensorStore, which cannot be used in process {os.getpid()}: it was forked after its "
            'parent had used TensorStore. Start it with multiprocessing.get_context("spawn"), or load in the parent'
        )


def tensorstore(subject: str) -> Any:
    """Import and return TensorStore for the operation `subject`, or raise SettingsError."""
    refuse_fork(subject)
    try:
        import tensorstore
    except ModuleNotFoundError as error:
        raise SettingsError(f"{subject} through TensorStore: pip install 'jaxckpt-train[orbax]'") from error
    except ImportError as error:
        raise SettingsError(f"{subject} through TensorStore, which cannot be imported: {shown(error)}") from error
    return tensorstore


def system_error(error: Exception, what: str, path: str) -> StorageError | None:
    """Return the file system's error behind an error of TensorStore, or None. TensorStore has its code only as text."""
    code = _code_of(error)
    return None if code is None else storage_error(code, what, path)


def read_error(error: ValueError, problem: str) -> CheckpointError:
    """Return the error for a failed read: StorageError if the system refused it, otherwise CorruptCheckpointError."""
    code, message = _code_of(error), f"{problem}: {shown(error, MAX_ERROR_CHARACTERS)}"
    return CorruptCheckpointError(message) if code is None or code in _OF_THE_NAME else StorageError(code, message)


def _code_of(error: Exception) -> int | None:
    found = _SYSTEM_ERROR.search(str(error))
    if found:
        return int(found[1])
    status = _NETWORK_ERROR.match(str(error))
    return None if status is None else errno.EACCES if status[1] in _REFUSED else errno.EIO


class OrbaxArray(NamedTuple):
    """An array: its record and its store. Call `check_size` before reading `store` directly."""

    record: ArrayRecord
    store: Any
    check_size: Callable[[], None]


def open_arrays(
    backend: Backend,
    directory: str,
    names: Mapping[str, str],
    segments: Segments,
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
    databases: Collection[str],
    is_whole: bool,
) -> dict[str, OrbaxArray]:
    """Open arrays of an item without reading their content, and add them to `segments`.

    `names` are the parameter names by leaf path, and `databases` the folders with an OCDBT database of their own, in
    the first versions. `is_whole`: every chunk was written, so a missing one is damage, and not zeros.
    """
    if not names:
        return {}
    ts = tensorstore(f"{directory}: an Orbax checkpoint is read")
    metadata = OCDBT if use_ocdbt else "zarr.json" if use_zarr3 else ZARR
    folders = {"", *databases} if use_ocdbt else {*names.values()}
    for name in sorted(f"{folder}/{metadata}".removeprefix("/") for folder in folders):
        size = _size(backend, directory, name)
        if size > MOST_METADATA_BYTES:  # TensorStore reads it whole when it opens an array
            problem = f"expected at most {MOST_METADATA_BYTES:,} bytes of metadata, found {size:,}"
            raise CorruptCheckpointError(f"{directory}/{name}: {problem}")
    context = ts.Context(
        {"cache_pool#nodes": {"total_bytes_limit": CACHED_BYTES}, "file_io_concurrency": {"limit": 16}}
    )
    specs = {
        leaf: _spec(backend, directory, name, use_ocdbt, use_zarr3, databases, is_whole) for leaf, name in names.items()
    }
    stores = _open_stores(directory, names, specs, context)
    cache, found = PieceCache(), dict[str, OrbaxArray]()
    for leaf, store in stores.items():
        subject = f"{directory}: leaf {leaf!r}"
        # A database protects the sizes of its chunks by digests.
        files = None if specs[leaf]["kvstore"]["driver"] == "ocdbt" else backend
        check_size = functools.cache(functools.partial(_check_chunks, subject, store, files, directory, names[leaf]))
        record = _add_array(subject, leaf, store, check_size, segments, cache)
        found[leaf] = OrbaxArray(record, store, check_size)
    return found


def _open_stores(
    directory: str, names: Mapping[str, str], specs: dict[str, dict[str, Any]], context: ts.Context
) -> dict[str, ts.TensorStore]:
    import tensorstore as ts

    found, leaves = {}, list(specs)
    for start in range(0, len(leaves), OPEN_AT_ONCE):
        futures = {}
        for leaf in leaves[start : start + OPEN_AT_ONCE]:
            with _naming_leaf(directory, leaf, names[leaf]):  # fails at once if the name is not a valid path
                futures[leaf] = ts.open(specs[leaf], context=context, open=True, read=True)
        for leaf, future in futures.items():
            with _naming_leaf(directory, leaf, names[leaf]), foreign_call():
                found[leaf] = future.result()
    return found


@contextlib.contextmanager
def _naming_leaf(directory: str, leaf: str, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise read_error(error, f"{directory}: leaf {leaf!r}: the array {name!r} cannot be opened") from error


def kvstore_of(backend: Backend, directory: str) -> dict[str, Any]:
    """Describe a directory for TensorStore. Raises SettingsError: it has no driver for this kind of storage."""
    return objects_of(backend).kvstore(directory) if is_url(directory) else {"driver": "file", "path": f"{directory}/"}


def _spec(
    backend: Backend,
    directory: str,
    name: str,
    use_ocdbt: bool,
    use_zarr3: bool,
    databases: Collection[str],
    is_whole: bool,
) -> dict[str, Any]:
    spec = {"driver": "zarr3" if use_zarr3 else "zarr", "fill_missing_data_reads": not is_whole}
    folder, _, last = name.rpartition("/")
    if folder and folder in databases:
        directory, name, use_ocdbt = f"{directory}/{folder}", last, True
    if not use_ocdbt:  # with an empty name, the array is stored in the directory of the item
        return spec | {"kvstore": kvstore_of(backend, f"{directory}/{name}" if name else directory)}
    base = kvstore_of(backend, directory)
    return spec | {"kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#nodes"}}


def _add_array(
    subject: str,
    leaf: str,
    store: ts.TensorStore,
    check_size: Callable[[], None],
    segments: Segments,
    cache: PieceCache,
) -> ArrayRecord:
    dtype, shape = np.dtype(store.dtype.numpy_dtype), tuple(store.shape)
    if not is_storable(dtype):
        raise CorruptCheckpointError(f"{subject}: expected a known dtype, found {store.dtype.name}")
    check_shape(shape, dtype.itemsize, subject)
    cell = _cell(shape, _chunk_shape(store), dtype.itemsize)
    count = math.prod(-(-size // width) for size, width in zip(shape, cell, strict=True))
    if count > MOST_PIECES:
        raise CorruptCheckpointError(f"{subject}: expected at most {MOST_PIECES:,} pieces, found {count:,}")

    def read(box: Box, target: np.ndarray) -> None:
        check_size()
        read_box(subject, store, box, target)

    chunks = segments.decode(subject, dtype, grid_boxes(shape, cell), read, cache)
    return array_record(leaf, shape, dtype_name(dtype), chunks)


def _cell(shape: Sequence[int], chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the shape to read at a time: a chunk, or several small chunks along the first axes."""
    cell = [max(1, min(width, size)) for width, size in zip(chunk, shape, strict=True)]
    for axis in reversed(range(len(cell))):
        wanted = -(-LEAST_CHUNK_BYTES // max(1, math.prod(cell) * itemsize))
        cell[axis] = min(max(1, shape[axis]), cell[axis] * wanted)
        if cell[axis] < shape[axis]:
            break
    return tuple(cell)


def read_box(subject: str, store: ts.TensorStore, box: Box, target: np.ndarray) -> None:
    """Read a box of an array."""
    refuse_fork(f"{subject}: is read")
    try:
        with foreign_call():
            _copy(store, box, target)  # a helper function, so that no TensorStore object outlives the foreign call
    except ValueError as error:
        raise read_error(error, f"{subject}: box {box} cannot be read") from error


def _copy(store: ts.TensorStore, box: Box, target: np.ndarray) -> None:
    import tensorstore as ts

    part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
    wanted = part.translate_to[0] if box else part
    ts.array(target, copy=False).write(wanted).result()


def _chunk_shape(store: ts.TensorStore, *, is_stored: bool = False) -> list[int]:
    """Return the shape of a chunk as it is decoded or stored. An array without chunks is a single chunk."""
    layout = store.chunk_layout
    chunk = (layout.write_chunk if is_stored else layout.read_chunk).shape or store.shape
    return [size or whole for size, whole in zip(chunk, store.shape, strict=True)]


def _chunk_bytes(store: ts.TensorStore, *, is_stored: bool = False) -> int:
    return math.prod(_chunk_shape(store, is_stored=is_stored)) * int(store.dtype.numpy_dtype.itemsize)


def _check_chunks(subject: str, store: ts.TensorStore, files: Backend | None, directory: str, folder: str) -> None:
    """Refuse an array with a chunk that is larger than its shape allows, or does not fit into memory."""
    size = _chunk_bytes(store)
    array_bytes = math.prod(store.shape) * int(store.dtype.numpy_dtype.itemsize)
    if size > max(LARGE_CHUNK_BYTES, array_bytes):
        raise CorruptCheckpointError(f"{subject}: expected chunks of at most {array_bytes:,} bytes, found {size:,}")
    if DECODING * size > memory_bytes():
        problem = f"{subject}: a chunk needs {DECODING * size:,} bytes of memory, this machine has {memory_bytes():,}"
        raise StorageError(errno.ENOMEM, problem)
    if files is None:
        return
    stored = _chunk_bytes(store, is_stored=True)
    most = stored + (stored >> 3) + MORE_STORED
    for name in _chunk_files(files, directory, folder):
        found = _size(files, directory, name)
        if found > most:
            problem = f"expected at most {most:,} bytes for a chunk of {stored:,}, found {found:,}"
            raise CorruptCheckpointError(f"{subject}: {directory}/{name}: {problem}")


def _chunk_files(files: Backend, directory: str, folder: str) -> Iterator[str]:
    """Yield the files of chunks. Their names are numbers joined by dots or folders, in zarr 3 with a leading `c`."""
    try:
        entries = files.list(f"{directory}/{folder}" if folder else directory)
    except StorageError:  # reading the array reports it
        return
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name[0].isdigit() or entry.name == "c" or entry.name.startswith("c."):
            if entry.kind == "directory":
                yield from _chunk_files(files, directory, name)
            else:
                yield name


def _size(files: Backend, directory: str, name: str) -> int:
    """Return the size of a file, or 0 if it cannot be read. TensorStore reports such a file."""
    try:
        with contextlib.closing(files.open(directory, name, direct=False)) as source:
            return source.size
    except (StorageError, CorruptCheckpointError):
        return 0
