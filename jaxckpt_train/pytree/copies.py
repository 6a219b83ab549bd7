"""Copies arrays from their devices, or within them, for a save, in the order of the files."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jax.sharding import SingleDeviceSharding

from jaxckpt_train.errors import CheckpointTimeoutError, SettingsError
from jaxckpt_train.pytree._jax import without_caller_settings
from jaxckpt_train.settings import Colocated, SnapshotMode
from jaxckpt_train.store.boxes import box_from_index
from jaxckpt_train.store.buffers import fresh_area
from jaxckpt_train.store.segment import ChunkSource, alignment_class
from jaxckpt_train.store.threads import Latch, shared_workers

# Of a larger tree only some leaves are checked: checking 10,000 takes a tenth of the time of a snapshot. All outputs of
# one computation become ready together.
MOST_ASKED = 32
ASKING_S = 1e-3  # a shorter wait is only the time of the call
COPYING_THREADS = 2
PIECE_BYTES = 16 << 20
ALIGNMENT = 64
LEAST_PAGED_BYTES = 1 << 20
_KEPT_AREAS = 8
_kept: list[mmap.mmap] = []  # memory that no copy uses now, already touched: an area per tree
_KIND = "pinned_host"
_HOST_KINDS = (_KIND, "unpinned_host")
_log = logging.getLogger("jaxckpt_train")
_refused: set[jax.Device] = set()
# This part of the memory that training has never used stays free, because allocators fragment memory.
SPARE_FRACTION = 0.05
_measured: set[jax.Device] = set()
GIVEN_UP = "given up: the state was not fetched from its devices in time"


def take_from_devices(
    leaves: Sequence[jax.Array], mode: SnapshotMode, ahead: TransferBudget
) -> tuple[list[tuple[ChunkSource, ...]], Transfers]:
    """Take arrays on any devices as they are now: their chunks, and the transfers that fetch those not here yet."""
    copies = copies_if_wanted(leaves, mode)
    shards = [distinct_shards(leaf) for leaf in copies or leaves]
    handles = [own_handle(shard.data) for several in shards for shard in several]
    taken, transfers = take_handles(handles, mode, ahead, is_copied=copies is not None)
    data = iter(taken)
    chunks = [
        tuple(ChunkSource(box_from_index(shard.index, leaf.shape), next(data)) for shard in several)
        for leaf, several in zip(leaves, shards, strict=True)
    ]
    return chunks, transfers


def copies_if_wanted(leaves: Sequence[jax.Array], mode: SnapshotMode) -> list[jax.Array] | None:
    """Copy the arrays on their devices if the mode asks for it and they have room; otherwise return None."""
    if mode == "device":
        return copy_on_devices(leaves)
    if mode == "auto" and have_room(leaves):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory
            return copy_on_devices(leaves)
    return None


def take_handles(
    handles: Sequence[jax.Array], mode: SnapshotMode, ahead: TransferBudget, *, is_copied: bool
) -> tuple[list[np.ndarray | LazyArray], Transfers]:
    """Return the data of single-device arrays in their order, and the transfers that fetch it."""
    is_bounded = is_copied or mode == "stream"
    transfers = Transfers(ahead if is_bounded else TransferBudget(sys.maxsize))
    in_order = sorted(range(len(handles)), key=lambda number: alignment_class(handles[number].nbytes))
    ordered = [handles[number] for number in in_order]
    if is_bounded:
        arrived = [transfers.add(handle, is_ours=is_copied) for handle in ordered]
    else:
        arrived = _start_all(transfers, ordered)
    taken = dict(zip(in_order, arrived, strict=True))
    transfers.begin()
    return [taken[number] for number in range(len(handles))], transfers


def _start_all(transfers: Transfers, handles: Sequence[jax.Array]) -> list[np.ndarray | LazyArray]:
    """Start all transfers now, and return the data: on its way to pinned host memory, or here.

    Arrays on the host are copied: a view would make a step that donates them fail.
    """
    started = start_transfers(handles)
    unmoved = [handle for handle, array in zip(handles, started, strict=True) if array is handle]
    transfers.waited_s = device_wait_s(some_arrays(unmoved))
    there = [handle for handle in handles if is_on_host(handle)]
    copies = iter(copy_all(list(map(np.asarray, there))))
    data: list[np.ndarray | LazyArray] = []
    for handle, array in zip(handles, started, strict=True):
        if array is not handle:
            data.append(transfers.add(array, is_ours=True))
        else:
            data.append(next(copies) if is_on_host(handle) else np.asarray(handle))
    return data


def own_handle(data: jax.Array) -> jax.Array:
    """Make a new object for a shard's data: JAX caches a copy on the host with the object that was asked for it."""
    own: jax.Array = data.addressable_data(0)
    return own


def distinct_shards(leaf: jax.Array) -> list[jax.Shard]:
    """Return one shard for each distinct part of an array on devices of this process."""
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]


def some_arrays(values: Sequence[Any]) -> list[jax.Array]:
    """Return the JAX arrays among `values`; of more than `MOST_ASKED` values, a sample."""
    step = -(-len(values) // MOST_ASKED) or 1
    return [value for value in values[::step] if isinstance(value, jax.Array) and not is_traced(value)]


def device_wait_s(arrays: Sequence[jax.Array]) -> float:
    """Wait until these arrays are computed; return the seconds (training time), 0.0 if nothing was left to compute."""
    if not arrays:
        return 0.0
    started = time.perf_counter()
    # Taking a deleted array, or the result of a failed computation, raises a better error later.
    with contextlib.suppress(RuntimeError):
        wait: Any = jax.block_until_ready
        wait(arrays)
    waited_s = time.perf_counter() - started
    return waited_s if waited_s > ASKING_S else 0.0


def is_traced(value: object) -> bool:
    """Return whether a value is one of a computation that is being traced."""
    return isinstance(value, jax.core.Tracer)


def copy_all(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copy all arrays in row-major order, with a few threads, into memory that is then kept for the next save."""
    if not arrays:
        return []
    starts, end = [], 0
    for array in arrays:  # large copies begin on a page, so that the disk can read them directly
        alignment = mmap.PAGESIZE if array.nbytes >= LEAST_PAGED_BYTES else ALIGNMENT
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + array.nbytes
    area = _take_kept_area(end)
    memory = np.frombuffer(area, np.uint8)
    weakref.finalize(memory, _keep_area, area).atexit = False
    copies = [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
    shared_workers(COPYING_THREADS, "jaxckpt-copy").run_all(_copy_on_host, _portions(arrays, copies))
    return copies


def _portions(arrays: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Split the work into portions for threads: many small arrays, or a part of a large one."""
    portions: list[list[tuple[np.ndarray, np.ndarray]]] = []
    filled = 0
    for array, copy in zip(arrays, copies, strict=True):
        pieces = [(array, copy)]
        if array.nbytes > PIECE_BYTES and array.flags.c_contiguous:
            source, target = array.reshape(-1), copy.reshape(-1)
            step = PIECE_BYTES // array.itemsize
            pieces = [(source[at : at + step], target[at : at + step]) for at in range(0, array.size, step)]
        for piece in pieces:
            if not portions or filled + piece[0].nbytes > PIECE_BYTES:
                portions.append([])
                filled = 0
            portions[-1].append(piece)
            filled += piece[0].nbytes
    return portions


def _copy_on_host(portion: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for source, target in portion:
        np.copyto(target, source)


def _take_kept_area(size: int) -> mmap.mmap:
    """Return kept memory of about this size; if there is none, the trees have changed, and all kept memory is freed."""
    for area in sorted(_kept, key=len):
        if size <= len(area) <= 2 * size + mmap.PAGESIZE:
            with contextlib.suppress(ValueError):  # another thread took it at this moment
                _kept.remove(area)
                return area
    _kept.clear()
    return fresh_area(max(size, mmap.PAGESIZE))


def _keep_area(area: mmap.mmap) -> None:
    _kept.append(area)
    del _kept[:-_KEPT_AREAS]


os.register_at_fork(after_in_child=_kept.clear)


def is_on_host(array: jax.Array) -> bool:
    """Return whether an array lies in host memory of its device, like an offloaded optimizer state."""
    return array.sharding.memory_kind in _HOST_KINDS


def is_single_controller(runtime_type: str) -> bool:
    """Return whether a runtime drives devices of many hosts from one process: "pathways", "proxy/pathways"."""
    return "pathways" in runtime_type.split("/")


def has_single_controller() -> bool:
    """Return whether a runtime of this process has a single controller; another one may drive its own CPU."""
    return any(is_single_controller(client.runtime_type) for client in backends().values())


def runs_on_hosts(sharding: jax.sharding.Sharding, setting: Colocated) -> bool:
    """Return whether arrays of this sharding are saved and loaded by the hosts of its devices."""
    if setting == "auto":
        devices: Any = sharding.device_set  # all of one client
        return is_single_controller(next(iter(devices)).client.runtime_type)
    if setting and jax.process_count() > 1:
        raise SettingsError(
            f"StoreSettings.colocated: True is only for one process that drives all devices, but this job has "
            f"{jax.process_count()} processes, each of which saves and loads what its own devices hold; leave it out"
        )
    return setting


def start_transfers(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Start transfers of single-device arrays to the host; return arrays to take the data from, in the same order.

    The arrays go to pinned host memory where their device supports it and has room: other transfers go through small
    buffers and are copied once more (jax-ml/jax#22114). Objects that are not the given ones are in pinned memory.
    """
    started = list(arrays)
    on_device = [number for number, array in enumerate(arrays) if not is_on_host(array)]
    devices = {number: next(iter(arrays[number].sharding.device_set)) for number in on_device}
    usable = {device for device in set(devices.values()) if device not in _refused and _knows_pinned_memory(device)}
    pinned = [number for number in on_device if devices[number] in usable]
    places = {device: SingleDeviceSharding(device, memory_kind=_KIND) for device in usable}
    try:
        moved = jax.device_put([arrays[n] for n in pinned], [places[devices[n]] for n in pinned]) if pinned else []
    except jax.errors.JaxRuntimeError as error:
        # A full allocator may block for seconds at every further request.
        _refused.update(usable)
        _log.warning(
            "the devices refused pinned host memory; saves work without it from now on, and block longer: %s", error
        )
        pinned, moved = [], []
    for number, array in zip(pinned, moved, strict=True):
        started[number] = array
    for number in on_device:
        if started[number] is arrays[number]:
            arrays[number].copy_to_host_async()
    return started


def _knows_pinned_memory(device: jax.Device) -> bool:
    try:
        return any(memory.kind == _KIND for memory in device.addressable_memories())
    except RuntimeError:  # a plugin without support for memory kinds
        return False


def copy_on_devices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copy arrays with their shardings, in one computation for the same devices; returns once the copies are enqueued.

    Devices run their work in order, so that a later step that donates the originals cannot overwrite them before.
    """
    copies: list[jax.Array | None] = [None] * len(arrays)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        devices = tuple(array.sharding.addressable_devices_indices_map(array.shape))
        groups[devices, array.sharding.memory_kind].append(number)
    for numbers in groups.values():
        shardings = tuple(arrays[number].sharding for number in numbers)
        with without_caller_settings():
            copied = jax.jit(_copy_on_device, out_shardings=shardings)(tuple(arrays[number] for number in numbers))
        for number, copy in zip(numbers, copied, strict=True):
            copies[number] = copy
    return [copy for copy in copies if copy is not None]


def _copy_on_device(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(array) for array in arrays)


def have_room(arrays: Sequence[jax.Array]) -> bool:
    """Return whether every device certainly has memory for a copy of its shards, on top of what training has used.

    The peak shows what training uses only after the first step: so the first answer for a device is always no.
    """
    needed: dict[jax.Device, int] = defaultdict(int)
    for array in arrays:
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.addressable_devices:
            needed[device] += size
    asked_before = _measured.issuperset(needed)
    _measured.update(needed)
    for device, size in needed.items() if asked_before else ():
        found = device.memory_stats() or {}
        if found.get("bytes_limit", -math.inf) * (1 - SPARE_FRACTION) - found.get("peak_bytes_in_use", math.inf) < size:
            return False
    return asked_before


class TransferBudget:
    """Limits how many bytes of one save are in transit from the devices, or fetched and not yet dropped.

    A single request is always granted when nothing else is counted. Callers of `take` hold `lock`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.Lock()
        self._under_way = 0
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, nbytes: int) -> bool:
        """Count these bytes if they fit; return whether they did."""
        self._collect()
        has_room = self._under_way <= 0 or self._under_way + nbytes <= self.limit_bytes
        if has_room:
            self._under_way += nbytes
        return has_room

    def take_anyway(self, nbytes: int) -> None:
        """Count these bytes without a limit."""
        self._collect()
        self._under_way += nbytes

    def _collect(self) -> None:
        while not self._dropped.empty():
            self._under_way -= self._dropped.get()

    def give_back(self, nbytes: int) -> None:
        """Release these bytes; a finalizer may call this at any time, on any thread."""
        self._dropped.put(nbytes)


class Busy:
    """Counts the threads in waits of unknown length, for devices or for other code, within `with`.

    A save without progress is not stalled meanwhile.
    """

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._threads -= 1

    def is_set(self) -> bool:
        """Return whether a thread waits."""
        return self._threads > 0


class Transfers:
    """Fetches single-device arrays to the host, in the order in which they were added, and releases each.

    Each fetch also starts the transfers of the next arrays, as far as `ahead` permits. `done` opens once nothing more
    is read from the devices; `busy`: with waits for the devices; `waited_s`: how long devices were waited for while the
    arrays were added.
    """

    def __init__(
        self, ahead: TransferBudget, start: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = start_transfers
    ) -> None:
        self.done, self.busy = Latch(), Busy()
        self._ahead, self._start = ahead, start
        self._waiting: list[jax.Array | None] = []
        self._to_copy: set[int] = set()
        self._lock = ahead.lock
        self._left = self._next = 0
        self._is_cancelled = False
        self.waited_s = 0.0

    def add(self, array: jax.Array, *, is_ours: bool = False) -> LazyArray | np.ndarray:
        """Add a single-device array; an array without elements is returned at once.

        An array on the host is copied when it is fetched, unless it `is_ours`: a view would make a step that donates it
        fail.
        """
        if not array.size:
            return np.empty(array.shape, array.dtype)
        if not is_ours and is_on_host(array):
            self._to_copy.add(len(self._waiting))
        self._waiting.append(array)
        self._left += 1
        return LazyArray(self, len(self._waiting) - 1, array.shape, np.dtype(array.dtype))

    def begin(self) -> None:
        """Start the first transfers, after all arrays are added."""
        if not self._left:
            self.done.open()
        with self._lock:
            self._start_more()

    def fetch(self, number: int) -> np.ndarray:
        """Bring array number `number` to the host, once; raise CheckpointTimeoutError if they were cancelled."""
        with self._lock:
            array = self._waiting[number]
            if array is None:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._waiting[number] = None
            if number >= self._next:  # out of order
                self._ahead.take_anyway(array.nbytes)
                (array,) = self._start([array])
            self._start_more()
        with self.busy:
            data = np.array(array, copy=True) if number in self._to_copy else np.asarray(array)
            weakref.finalize(data, self._ahead.give_back, array.nbytes).atexit = False
        with self._lock:
            if self._is_cancelled:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._left -= 1
            last = self._left == 0
        if last:
            self.done.open()
        return data

    def leave(self, number: int) -> None:
        """Leave array number `number` where it is, because nobody needs it, unless it was fetched."""
        with self._lock:
            array, self._waiting[number] = self._waiting[number], None
            if array is None:
                return
            if number < self._next:
                self._ahead.give_back(array.nbytes)
            self._start_more()
            self._left -= 1
            last = self._left == 0
        if last:
            self.done.open()

    def wait_for_devices(self) -> float:
        """Wait until the first array, and so everything that was queued before, is computed; return the seconds."""
        with self._lock:
            first = next((array for array in self._waiting if array is not None), None)
        with self.busy:
            return device_wait_s([] if first is None else [first])

    def cancel(self) -> bool:
        """Make further fetches fail, unless all are done; return whether they will."""
        with self._lock:
            self._is_cancelled = self._left > 0
        return self._is_cancelled

    def close(self) -> None:
        """Release the arrays that were not fetched."""
        with self._lock:
            self._waiting = [None] * len(self._waiting)
            self._next = len(self._waiting)
        self.done.open()

    def _start_more(self) -> None:
        next_ones: list[int] = []
        while self._next < len(self._waiting):
            array = self._waiting[self._next]
            if array is not None:
                if not self._ahead.take(array.nbytes):
                    break
                next_ones.append(self._next)
            self._next += 1
        if next_ones:
            started = self._start([array for n in next_ones if (array := self._waiting[n]) is not None])
            for number, array in zip(next_ones, started, strict=True):
                self._waiting[number] = array


class LazyArray:
    """An array, or a part of one, that is fetched when it is written; implements `store.segment.LazyArray`."""

    def __init__(
        self,
        transfers: Transfers,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        inner: tuple[slice, ...] | None = None,
    ) -> None:
        self._transfers, self._number, self._inner = transfers, number, inner
        self.shape, self.dtype, self.size = shape, dtype, math.prod(shape)
        self.nbytes = self.size * dtype.itemsize

    def __getitem__(self, inner: tuple[slice, ...]) -> LazyArray:
        shape = tuple(len(range(size)[part]) for size, part in zip(self.shape, inner, strict=True))
        return LazyArray(self._transfers, self._number, shape, self.dtype, inner)

    def fetch(self) -> np.ndarray:
        """The data; may be called once, from any thread."""
        data = self._transfers.fetch(self._number)
        return data if self._inner is None else data[self._inner]

    def leave(self) -> None:
        """Do not fetch it: it is not written."""
        self._transfers.leave(self._number)
