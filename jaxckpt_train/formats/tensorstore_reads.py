"""Reads arrays of Orbax items with TensorStore: zarr of both versions, in an OCDBT database or in plain files.

TensorStore is imported on first use. An interrupt during the import is delivered afterwards, a process that was forked
after TensorStore started its threads refuses to use it, and its errors become the library's own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.formats.foreign import (
    CachedPieces,
    DecodedArraySource,
    ForeignSegment,
    RecentPieces,
    array_record,
    check_shape,
    foreign_call,
    grid_boxes,
    page_aligned_chunks,
    segment_size,
)
from jaxckpt_train.formats.orbax_metadata import ChunkLimits, check_metadata_sizes, chunk_bytes, chunk_shape
from jaxckpt_train.store.backends.base import MISSING, Backend, storage_error
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.dtypes import dtype_name, is_storable
from jaxckpt_train.store.manifest import ArrayRecord, shown

if TYPE_CHECKING:
    import tensorstore as ts

MAX_ERROR_CHARACTERS = 2000  # of a message of TensorStore, which contains a path
OPEN_AT_ONCE = 256
LEAST_CHUNK_BYTES = 4 << 20  # smaller chunks are read together
MOST_PIECES = 1 << 20  # of an array, each of which has a record: 4 TiB in the smallest pieces
DECODING = 2  # reading a chunk needs twice its size: its stored bytes and its elements
CACHED_BYTES = 100 << 20  # nodes of OCDBT databases
_SYSTEM_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")  # in messages of different versions
_STARTED = "/tensorstore/thread_pool/started"  # TensorStore's count of the threads started in this process
_OF_THE_NAME = MISSING | {errno.ENAMETOOLONG}  # no file can have this name, so the metadata with the name is damaged
_has_threads = False  # at the last fork
_is_lost_to_fork = False


def _look_for_threads() -> None:
    """Record before a fork whether TensorStore has threads, which the child process will not have."""
    global _has_threads
    library = sys.modules.get("tensorstore")
    count = getattr(library, "experimental_collect_matching_metrics", None)
    _has_threads = library is not None and (count is None or bool(count(_STARTED)))


def _after_fork() -> None:
    global _is_lost_to_fork
    _is_lost_to_fork = _is_lost_to_fork or _has_threads


os.register_at_fork(before=_look_for_threads, after_in_child=_after_fork)


def refuse_fork(subject: str) -> None:
    """Refuse to use TensorStore in a process where it would abort.

    Args:
        subject: the operation, as the start of the message.

    Raises:
        SettingsError: this process was forked after TensorStore had started threads.
    """
    if _is_lost_to_fork:
        raise SettingsError(
            f"{subject} through TensorStore, which cannot be used in process {os.getpid()}: the process was forked "
            "after "
            'its parent had used TensorStore. Start it with multiprocessing.get_context("spawn"), or load in the parent'
        )


def tensorstore(subject: str) -> Any:
    """Import and return TensorStore.

    Args:
        subject: the operation, as the start of the message.

    Raises:
        SettingsError: TensorStore is not installed, cannot be imported, or cannot be used in this forked process.
    """
    refuse_fork(subject)
    with _delay_interrupts():  # an interrupt during the start of an extension module would become an ImportError
        try:
            import tensorstore
        except ModuleNotFoundError as error:
            raise SettingsError(f"{subject} through TensorStore: pip install 'jaxckpt-train[orbax]'") from error
        except ImportError as error:
            raise SettingsError(
                f"{subject} through TensorStore, which is installed but cannot be imported: {shown(error)}"
            ) from error
    return tensorstore


def system_error(error: Exception, what: str, path: str) -> StorageError | None:
    """Return the file system's error behind an error of TensorStore, or None. TensorStore has its code only as text."""
    code = _code_of(error)
    return None if code is None else storage_error(code, what, path)


def read_error(error: ValueError, problem: str) -> CheckpointError:
    """Return the error for a failed read: StorageError if the system refused it, otherwise CorruptCheckpointError.

    Args:
        error: the error of TensorStore.
        problem: the message, to which the message of TensorStore is added.
    """
    code, message = _code_of(error), f"{problem}: {shown(error, MAX_ERROR_CHARACTERS)}"
    return CorruptCheckpointError(message) if code is None or code in _OF_THE_NAME else StorageError(code, message)


def _code_of(error: Exception) -> int | None:
    found = _SYSTEM_ERROR.search(str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Deliver an interrupt when the block ends."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for each in came[:1]:
            before(*each)


class OrbaxArray(NamedTuple):
    """An array: its record, its segment and its store. Check `limits` before reading `store` directly."""

    record: ArrayRecord
    segment: ForeignSegment
    store: Any
    limits: ChunkLimits | None = None


def open_arrays(
    backend: Backend,
    directory: str,
    names: dict[str, str],
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
    first_segment: int,
    databases: Collection[str] = (),
    is_whole: bool = False,
    takes_direct: bool = False,
) -> dict[str, OrbaxArray]:
    """Open arrays without reading their content.

    Args:
        backend: the storage.
        directory: the directory of the item.
        names: the parameter names by leaf path.
        use_ocdbt, use_zarr3: the form of the arrays.
        first_segment: the number of the first array's segment.
        databases: folders of the item with an OCDBT database of their own, in the first versions.
        is_whole: whether every chunk was written. A missing chunk is then damage, and otherwise zeros.
        takes_direct: whether large chunks can bypass the page cache.

    Raises:
        SettingsError: TensorStore is not installed.
        CorruptCheckpointError: an array is missing or damaged.
        StorageError: the system refused to read an array.
    """
    if not names:
        return {}
    ts = tensorstore(f"{directory}: an Orbax checkpoint is read")
    folders = [*databases] if use_ocdbt else [*names.values()]
    check_metadata_sizes(backend, directory, folders, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    context = ts.Context(
        {"cache_pool#nodes": {"total_bytes_limit": CACHED_BYTES}, "file_io_concurrency": {"limit": 16}}
    )
    specs = {leaf: _spec(directory, name, use_ocdbt, use_zarr3, databases, is_whole) for leaf, name in names.items()}
    stores = _open_stores(directory, names, specs, context)
    direct = _direct_context(context) if takes_direct else None
    large = [] if direct is None else [leaf for leaf in stores if chunk_bytes(stores[leaf]) >= LEAST_CHUNK_BYTES]
    direct_stores = _open_stores(directory, names, {leaf: specs[leaf] for leaf in large}, direct)
    recent, found = RecentPieces(), dict[str, OrbaxArray]()
    for number, leaf in enumerate(stores):
        ways = [each[leaf] for each in (direct_stores, stores) if leaf in each]
        files = None if specs[leaf]["kvstore"]["driver"] == "ocdbt" else backend
        limits = ChunkLimits(files, directory, names[leaf], f"{directory}: leaf {leaf!r}", stores[leaf])
        found[leaf] = _orbax_array(directory, leaf, ways, limits, first_segment + number, recent)
    return found


def _open_stores(
    directory: str, names: dict[str, str], specs: dict[str, dict[str, Any]], context: ts.Context | None
) -> dict[str, ts.TensorStore]:
    """Open arrays, many at a time."""
    import tensorstore as ts

    found, leaves = {}, list(specs)
    for start in range(0, len(leaves), OPEN_AT_ONCE):
        some = leaves[start : start + OPEN_AT_ONCE]
        futures = []
        for leaf in some:
            with _naming_leaf(directory, leaf, names[leaf]):  # fails at once if the name is not a valid path
                futures.append(ts.open(specs[leaf], context=context, open=True, read=True))
        for leaf, future in zip(some, futures, strict=True):
            with _naming_leaf(directory, leaf, names[leaf]), foreign_call():
                found[leaf] = future.result()
    return found


def _direct_context(context: ts.Context) -> ts.Context | None:
    """Return a context whose file reads bypass the page cache, or None if this TensorStore has no such reads."""
    import tensorstore as ts

    try:
        return ts.Context({"file_io_mode": {"mode": "direct"}}, context)
    except ValueError:
        return None


@contextlib.contextmanager
def _naming_leaf(directory: str, leaf: str, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise read_error(error, f"{directory}: leaf {leaf!r}: the array {name!r} cannot be opened") from error


def _spec(
    directory: str, name: str, use_ocdbt: bool, use_zarr3: bool, databases: Collection[str], is_whole: bool
) -> dict[str, Any]:
    spec = {"driver": "zarr3" if use_zarr3 else "zarr", "fill_missing_data_reads": not is_whole}
    folder, _, last = name.rpartition("/")
    if folder and folder in databases:
        directory, name, use_ocdbt = f"{directory}/{folder}", last, True
    if not use_ocdbt:  # with an empty name, the array is stored in the directory of the item
        return spec | {"kvstore": {"driver": "file", "path": f"{directory}/{name}/" if name else f"{directory}/"}}
    base = {"driver": "file", "path": f"{directory}/"}
    return spec | {
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#nodes"},
    }


def _orbax_array(
    directory: str, leaf: str, stores: Sequence[ts.TensorStore], limits: ChunkLimits, segment: int, recent: RecentPieces
) -> OrbaxArray:
    store = stores[-1]
    dtype, shape = np.dtype(store.dtype.numpy_dtype), tuple(store.shape)
    if not is_storable(dtype):
        raise CorruptCheckpointError(f"{directory}: leaf {leaf!r}: expected a known dtype, found {store.dtype.name}")
    subject, cached = f"{directory}: leaf {leaf!r}", CachedPieces(recent)
    check_shape(shape, dtype.itemsize, subject)
    cell = _cell(shape, chunk_shape(store), dtype.itemsize)
    count = math.prod(-(-size // width) for size, width in zip(shape, cell, strict=True))
    if count > MOST_PIECES:
        raise CorruptCheckpointError(
            f"{subject}: expected at most {MOST_PIECES:,} pieces, found {count:,} in shape {list(shape)}"
        )
    chunks = page_aligned_chunks(grid_boxes(shape, cell), dtype.itemsize, segment)
    record = array_record(leaf, shape, dtype_name(dtype), chunks)

    def read(box: Box, target: np.ndarray) -> None:
        limits.check()
        read_box(subject, stores, box, target)

    source = functools.partial(_source, subject, dtype, record, read, cached=cached)
    return OrbaxArray(
        record, ForeignSegment(f"arrays/{segment:06d}", segment_size(record.chunks), source), store, limits
    )


def hold_array(subject: str, name: str, content: np.ndarray, segment: int) -> OrbaxArray:
    """Return an array whose content is in memory.

    Args:
        subject: the array, for messages.
        name: its leaf path.
        content: its content in row-major order.
        segment: the number of its segment.
    """
    chunks = page_aligned_chunks([full_box(content.shape)], content.dtype.itemsize, segment)
    record = array_record(name, content.shape, dtype_name(content.dtype), chunks)

    def read(box: Box, target: np.ndarray) -> None:
        target[...] = content[tuple(slice(start, stop) for start, stop in box)]

    source = functools.partial(_source, subject, content.dtype, record, read)
    return OrbaxArray(record, ForeignSegment(f"arrays/{segment:06d}", segment_size(record.chunks), source), None)


def _cell(shape: Sequence[int], chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the shape to read at a time: a chunk, or several small chunks along the first axes."""
    cell = [max(1, min(width, size)) for width, size in zip(chunk, shape, strict=True)]
    for axis in reversed(range(len(cell))):
        wanted = -(-LEAST_CHUNK_BYTES // max(1, math.prod(cell) * itemsize))
        cell[axis] = min(max(1, shape[axis]), cell[axis] * wanted)
        if cell[axis] < shape[axis]:
            break
    return tuple(cell)


def _source(
    subject: str, dtype: np.dtype, record: ArrayRecord, read: Any, direct: Any, cached: CachedPieces | None = None
) -> Any:
    return DecodedArraySource(subject, dtype, record.chunks, read, cached)


def read_box(subject: str, stores: Sequence[ts.TensorStore], box: Box, target: np.ndarray) -> None:
    """Read a box of an array into memory.

    Args:
        subject: the array, for messages.
        stores: ways to open the array, in order. The next one is tried when a read fails, since storage may refuse
            direct reads.
        box: the box to read.
        target: the row-major memory to fill.

    Raises:
        CorruptCheckpointError: the stored content is damaged.
        StorageError: the system refused to read it.
        SettingsError: TensorStore cannot be used in this forked process.
    """
    refuse_fork(f"{subject}: is read")
    *others, last = stores
    for store in others:
        with contextlib.suppress(ValueError), foreign_call():
            return _copy(store, box, target)
    try:
        with foreign_call():
            _copy(last, box, target)  # a helper function, so that no TensorStore object outlives the foreign call
    except ValueError as error:
        raise read_error(error, f"{subject}: box {box} cannot be read") from error


def _copy(store: ts.TensorStore, box: Box, target: np.ndarray) -> None:
    import tensorstore as ts

    part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
    wanted = part.translate_to[0] if box else part
    ts.array(target, copy=False).write(wanted).result()
