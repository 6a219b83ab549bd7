"""The arrays of an Orbax item, which TensorStore reads: zarr of both versions, in an OCDBT database or plain files.

TensorStore as it is used here: imported so that no interrupt is lost, and its errors told as ours.
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
from jaxckpt_train.formats.orbax_metadata import Bounds, check_metadata, chunk_bytes, chunk_shape
from jaxckpt_train.store.backends.base import MISSING, Backend, refusal
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.dtypes import dtype_name, is_storable
from jaxckpt_train.store.manifest import ArrayRecord, shown

if TYPE_CHECKING:
    import tensorstore as ts

MAX_ERROR_CHARACTERS = 2000  # of an error of TensorStore, which names a file
_SYSTEM_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")  # as its versions have it
_STARTED = "/tensorstore/thread_pool/started"  # its count of the threads that it has started in this process
_OF_THE_NAME = MISSING | {errno.ENAMETOOLONG}  # nothing can be there, so whatever has this name is damaged
_has_threads = False  # as of the last fork
_is_lost_to_fork = False
OPEN_AT_ONCE = 256
LEAST_CHUNK_BYTES = 4 << 20  # smaller ones are read together
MOST_PIECES = 1 << 20  # of an array: 4 TiB in the smallest ones; a record of each is made when it is opened
DECODING = 2  # times a chunk's size: as it is stored, and as it is decoded
CACHED_BYTES = 100 << 20  # of nodes of an OCDBT database


def _look_for_threads() -> None:
    """Note before a fork whether TensorStore has started threads, which the child will not have."""
    global _has_threads
    library = sys.modules.get("tensorstore")
    count = getattr(library, "experimental_collect_matching_metrics", None)
    _has_threads = library is not None and (count is None or bool(count(_STARTED)))


def _note_fork() -> None:
    global _is_lost_to_fork
    _is_lost_to_fork = _is_lost_to_fork or _has_threads


os.register_at_fork(before=_look_for_threads, after_in_child=_note_fork)


def refuse_fork(subject: str) -> None:
    """Refuse to use TensorStore in a process in which it would abort.

    Args:
        subject: what is done through it, for messages.

    Raises:
        SettingsError: this process was forked after TensorStore had started its threads.
    """
    if _is_lost_to_fork:
        raise SettingsError(
            f"{subject} through TensorStore, which cannot be used in process {os.getpid()}: it was forked after its "
            'parent had used TensorStore. Start the process by multiprocessing.get_context("spawn"), or load in the '
            "parent"
        )


def tensorstore(subject: str) -> Any:
    """The library.

    Args:
        subject: what is done through it, for messages.

    Raises:
        SettingsError: it is not installed, cannot be imported, or cannot be used in this forked process.
    """
    refuse_fork(subject)
    with _interrupts_wait():  # one within the start of an extension becomes an ImportError
        try:
            import tensorstore
        except ModuleNotFoundError as error:
            raise SettingsError(f"{subject} through TensorStore: pip install 'jaxckpt-train[orbax]'") from error
        except ImportError as error:
            raise SettingsError(
                f"{subject} through TensorStore, which is installed but cannot be imported: {shown(error)}"
            ) from error
    return tensorstore


def refused(error: Exception, what: str, path: str) -> StorageError | None:
    """What the file system said, if it was that which failed: TensorStore tells the number in its text."""
    code = _code_of(error)
    return None if code is None else refusal(code, what, path)


def read_error(error: ValueError, told: str) -> CheckpointError:
    """What a read that failed means: that the system refused, or else that what is stored is damaged.

    Args:
        error: of TensorStore.
        told: the message, but for what TensorStore says.
    """
    code, message = _code_of(error), f"{told}: {shown(error, MAX_ERROR_CHARACTERS)}"
    return CorruptCheckpointError(message) if code is None or code in _OF_THE_NAME else StorageError(code, message)


def _code_of(error: Exception) -> int | None:
    found = _SYSTEM_ERROR.search(str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Within: an interrupt does what it does at the end."""
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
    """An array: its record, and what it is read from; `bounds` are looked at before `store` is read itself."""

    record: ArrayRecord
    segment: ForeignSegment
    store: Any
    bounds: Bounds | None = None


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
    """Open arrays; nothing of their content is read.

    Args:
        backend: where.
        directory: of the item.
        names: of the parameters, by leaf path.
        use_ocdbt, use_zarr3: how they are stored.
        first_segment: the number of the first one's segment.
        databases: folders below the item with an OCDBT database of their own, as first versions have them.
        is_whole: every chunk was written: one that is missing is damage, and not zeros.
        takes_direct: whether files there can be read beside the page cache; then large chunks are.

    Raises:
        SettingsError: TensorStore is not installed.
        CorruptCheckpointError: one is not there, or damaged.
        StorageError: the system refused to read one.
    """
    if not names:
        return {}
    ts = tensorstore(f"{directory}: a checkpoint of Orbax is read")
    folders = [*databases] if use_ocdbt else [*names.values()]
    check_metadata(backend, directory, folders, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    context = ts.Context(
        {"cache_pool#nodes": {"total_bytes_limit": CACHED_BYTES}, "file_io_concurrency": {"limit": 16}}
    )
    specs = {leaf: _spec(directory, name, use_ocdbt, use_zarr3, databases, is_whole) for leaf, name in names.items()}
    stores = _stores(directory, names, specs, context)
    direct = _direct(context) if takes_direct else None
    large = [] if direct is None else [leaf for leaf in stores if chunk_bytes(stores[leaf]) >= LEAST_CHUNK_BYTES]
    beside = _stores(directory, names, {leaf: specs[leaf] for leaf in large}, direct)
    newest, found = RecentPieces(), dict[str, OrbaxArray]()
    for number, leaf in enumerate(stores):
        ways = [each[leaf] for each in (beside, stores) if leaf in each]
        files = None if specs[leaf]["kvstore"]["driver"] == "ocdbt" else backend
        bounds = Bounds(files, directory, names[leaf], f"{directory}: leaf {leaf!r}", stores[leaf])
        found[leaf] = _opened(directory, leaf, ways, bounds, first_segment + number, newest)
    return found


def _stores(
    directory: str, names: dict[str, str], specs: dict[str, dict[str, Any]], context: ts.Context | None
) -> dict[str, ts.TensorStore]:
    """Open some arrays, many at a time."""
    import tensorstore as ts

    found, leaves = {}, list(specs)
    for start in range(0, len(leaves), OPEN_AT_ONCE):
        some = leaves[start : start + OPEN_AT_ONCE]
        futures = []
        for leaf in some:
            with _told(directory, leaf, names[leaf]):  # a name may be no path
                futures.append(ts.open(specs[leaf], context=context, open=True, read=True))
        for leaf, future in zip(some, futures, strict=True):
            with _told(directory, leaf, names[leaf]), foreign_call():
                found[leaf] = future.result()
    return found


def _direct(context: ts.Context) -> ts.Context | None:
    """The same resources, but files are read beside the page cache; None: this TensorStore knows of no such reads."""
    import tensorstore as ts

    try:
        return ts.Context({"file_io_mode": {"mode": "direct"}}, context)
    except ValueError:
        return None


@contextlib.contextmanager
def _told(directory: str, leaf: str, name: str) -> Iterator[None]:
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
    if not use_ocdbt:  # an array whose name is empty lies in the item's own directory
        return spec | {"kvstore": {"driver": "file", "path": f"{directory}/{name}/" if name else f"{directory}/"}}
    base = {"driver": "file", "path": f"{directory}/"}
    return spec | {
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#nodes"},
    }


def _opened(
    directory: str, leaf: str, stores: Sequence[ts.TensorStore], bounds: Bounds, segment: int, newest: RecentPieces
) -> OrbaxArray:
    store = stores[-1]
    dtype, shape = np.dtype(store.dtype.numpy_dtype), tuple(store.shape)
    if not is_storable(dtype):
        raise CorruptCheckpointError(
            f"{directory}: leaf {leaf!r}: an array of {store.dtype.name}, which is not known here"
        )
    subject, held = f"{directory}: leaf {leaf!r}", CachedPieces(newest)
    check_shape(shape, dtype.itemsize, subject)
    cell = _cell(shape, chunk_shape(store), dtype.itemsize)
    count = math.prod(-(-size // width) for size, width in zip(shape, cell, strict=True))
    if count > MOST_PIECES:
        raise CorruptCheckpointError(
            f"{subject}: shape {list(shape)}, {count:,} pieces, expected at most {MOST_PIECES:,}"
        )
    chunks = page_aligned_chunks(grid_boxes(shape, cell), dtype.itemsize, segment)
    record = array_record(leaf, shape, dtype_name(dtype), chunks)

    def read(box: Box, target: np.ndarray) -> None:
        bounds.check()
        read_box(subject, stores, box, target)

    source = functools.partial(_source, subject, dtype, record, read, held=held)
    return OrbaxArray(
        record, ForeignSegment(f"arrays/{segment:06d}", segment_size(record.chunks), source), store, bounds
    )


def hold_array(subject: str, name: str, content: np.ndarray, segment: int) -> OrbaxArray:
    """An array whose content is in memory.

    Args:
        subject: it, for messages.
        name: its leaf path.
        content: of it, in row-major order.
        segment: the number of its segment.
    """
    chunks = page_aligned_chunks([full_box(content.shape)], content.dtype.itemsize, segment)
    record = array_record(name, content.shape, dtype_name(content.dtype), chunks)

    def read(box: Box, target: np.ndarray) -> None:
        target[...] = content[tuple(slice(start, stop) for start, stop in box)]

    source = functools.partial(_source, subject, content.dtype, record, read)
    return OrbaxArray(record, ForeignSegment(f"arrays/{segment:06d}", segment_size(record.chunks), source), None)


def _cell(shape: Sequence[int], chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """What is read at a time: a chunk, or some of them along the first axis where they are small."""
    cell = [max(1, min(width, size)) for width, size in zip(chunk, shape, strict=True)]
    for axis in reversed(range(len(cell))):
        wanted = -(-LEAST_CHUNK_BYTES // max(1, math.prod(cell) * itemsize))
        cell[axis] = min(max(1, shape[axis]), cell[axis] * wanted)
        if cell[axis] < shape[axis]:
            break
    return tuple(cell)


def _source(
    subject: str, dtype: np.dtype, record: ArrayRecord, read: Any, direct: Any, held: CachedPieces | None = None
) -> Any:
    return DecodedArraySource(subject, dtype, record.chunks, read, held)


def read_box(subject: str, stores: Sequence[ts.TensorStore], box: Box, target: np.ndarray) -> None:
    """Read a box of an array into memory.

    Args:
        subject: the array, for messages.
        stores: ways to read it: each is tried where that before has failed, as a disk may refuse some reads.
        box: of it.
        target: row-major.

    Raises:
        CorruptCheckpointError: what is stored is damaged.
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
            _copy(last, box, target)  # what it makes of TensorStore's is gone again when it returns
    except ValueError as error:
        raise read_error(error, f"{subject}: box {box} cannot be read") from error


def _copy(store: ts.TensorStore, box: Box, target: np.ndarray) -> None:
    import tensorstore as ts

    part = store[tuple(slice(start, stop) for start, stop in box)] if box else store
    wanted = part.translate_to[0] if box else part
    ts.array(target, copy=False).write(wanted).result()
