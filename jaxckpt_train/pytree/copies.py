"""Takes arrays from their devices: copied where they are or brought to the host, in the order of the files.

Transfers: brings device arrays to the host one after the other, a bounded number of bytes ahead of the writer.

Copies of arrays on their own devices, so that training goes on while the copies leave for the host.

Pinned host memory: devices write into it on their own, so that a transfer holds nobody up and is copied once.

Copies of state that is on the host already, into memory that is kept and used again by the next save.

Waits for arrays whose updates JAX has only queued so far, and says how long that took.
"""

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
from jax.sharding import SingleDeviceSharding

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.pytree._jax import nothing_set
from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import box_from_index
from jaxckpt_train.store.buffers import fresh_area
from jaxckpt_train.store.segment import ChunkSource, alignment_class
from jaxckpt_train.store.threads import Latch, shared_workers

# Of a larger tree some leaves are asked: asking 10,000 takes a tenth of the time of a snapshot. All outputs of one
# computation become ready together.
MOST_ASKED = 32
ASKING_S = 1e-3  # a wait that is shorter is the time of asking
COPYING_THREADS = 2
PIECE_BYTES = 16 << 20
ALIGNMENT = 64
LEAST_PAGED_BYTES = 1 << 20
_KEPT_AREAS = 8
_kept: list[mmap.mmap] = []  # memory that no copy uses at the moment, touched already: an area per tree
_KIND = "pinned_host"
_HOST_KINDS = (_KIND, "unpinned_host")
_log = logging.getLogger("jaxckpt_train")
_refused: set[jax.Device] = set()
# Of the memory that training has never used, this much stays free: allocators cut memory up.
SPARE_FRACTION = 0.05
_measured: set[jax.Device] = set()
GIVEN_UP = "given up: the state was not taken from its devices in time"


def some_arrays(values: Sequence[Any]) -> list[jax.Array]:
    """The JAX arrays among `values`; of more than `MOST_ASKED` values, some of them."""
    step = -(-len(values) // MOST_ASKED) or 1
    return [value for value in values[::step] if isinstance(value, jax.Array) and not _is_traced(value)]


def device_wait_s(arrays: Sequence[jax.Array]) -> float:
    """Wait until these arrays are computed; those that are deleted are passed over.

    A loop that does not wait for its device runs ahead of it; JAX queues its updates. Waiting for them is training.

    Returns:
        Seconds that the devices needed; 0.0 if nothing was left to compute.
    """
    if not arrays:
        return 0.0
    started = time.perf_counter()
    # Who takes a deleted array, or the result of a computation that failed, raises an error that names it.
    with contextlib.suppress(RuntimeError):
        wait: Any = jax.block_until_ready
        wait(arrays)
    waited_s = time.perf_counter() - started
    return waited_s if waited_s > ASKING_S else 0.0


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def copy_all(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Row-major copies of all arrays, made by a few threads at the speed of memory from the second time on.

    The memory is as large as the state, and kept for the next save when the last of the copies is dropped. Large copies
    begin on a page, so that the disk can have them from where they are.
    """
    if not arrays:
        return []
    starts, end = [], 0
    for array in arrays:
        alignment = mmap.PAGESIZE if array.nbytes >= LEAST_PAGED_BYTES else ALIGNMENT
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + array.nbytes
    area = _take(end)
    memory = np.frombuffer(area, np.uint8)
    weakref.finalize(memory, _give_back, area).atexit = False
    copies = [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
    shared_workers(COPYING_THREADS, "jaxckpt-copy").run_all(_copy_on_host, _portions(arrays, copies))
    return copies


def _portions(arrays: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """What one thread copies at a time: many small arrays, or a part of a large one."""
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


def _take(size: int) -> mmap.mmap:
    """Memory that was used for as much before; where there is none, the trees have changed, and all is made anew."""
    for area in sorted(_kept, key=len):
        if size <= len(area) <= 2 * size + mmap.PAGESIZE:
            with contextlib.suppress(ValueError):  # another thread took it at this moment
                _kept.remove(area)
                return area
    _kept.clear()
    return fresh_area(max(size, mmap.PAGESIZE))


def _give_back(area: mmap.mmap) -> None:
    _kept.append(area)
    del _kept[:-_KEPT_AREAS]


os.register_at_fork(after_in_child=_kept.clear)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array lies in host memory of its device, as an offloaded optimizer state does."""
    return array.sharding.memory_kind in _HOST_KINDS


def start_transfers(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Order that arrays of one device each are brought to the host; returns before they are there.

    They go to pinned host memory where their device knows such memory and has room. What happens to the arrays
    afterwards, donation included, cannot reach what is transferred: JAX keeps that order. It also keeps pinned memory
    that is let go of for the next transfers. JAX's own array serialization takes this way too (jax-ml/jax#22114), since
    other transfers go through small buffers and are copied once more.

    Returns:
        Arrays to take the data from, in the same order; `np.asarray` of one waits until it is there. Other objects than
        those given lie in pinned memory and are the caller's own.
    """
    started = list(arrays)
    away = [number for number, array in enumerate(arrays) if not is_on_host(array)]
    devices = {number: next(iter(arrays[number].sharding.device_set)) for number in away}
    usable = {device for device in set(devices.values()) if device not in _refused and _knows_pinned_memory(device)}
    pinned = [number for number in away if devices[number] in usable]
    places = {device: SingleDeviceSharding(device, memory_kind=_KIND) for device in usable}
    try:
        moved = jax.device_put([arrays[n] for n in pinned], [places[devices[n]] for n in pinned]) if pinned else []
    except jax.errors.JaxRuntimeError as error:
        # Asked again, an allocator that is full may wait for seconds, with every save.
        _refused.update(usable)
        _log.warning(
            "saves do without pinned host memory from now on, and wait longer: the devices refused it: %s", error
        )
        pinned, moved = [], []
    for number, array in zip(pinned, moved, strict=True):
        started[number] = array
    for number in away:
        if started[number] is arrays[number]:
            arrays[number].copy_to_host_async()
    return started


def _knows_pinned_memory(device: jax.Device) -> bool:
    try:
        return any(memory.kind == _KIND for memory in device.addressable_memories())
    except RuntimeError:  # a plugin that knows nothing of kinds of memory
        return False


def copy_on_devices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies with the same shardings. Returns once the copying is ordered, before it is done.

    The devices run what they are given in order, so a later step that is given the originals' memory cannot reach it
    before the copies are made. One computation copies all arrays on the same devices; it is compiled at the first save.
    """
    copies: list[jax.Array | None] = [None] * len(arrays)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        devices = tuple(array.sharding.addressable_devices_indices_map(array.shape))
        groups[devices, array.sharding.memory_kind].append(number)
    for numbers in groups.values():
        shardings = tuple(arrays[number].sharding for number in numbers)
        with nothing_set():
            copied = jax.jit(_copy_on_device, out_shardings=shardings)(tuple(arrays[number] for number in numbers))
        for number, copy in zip(numbers, copied, strict=True):
            copies[number] = copy
    return [copy for copy in copies if copy is not None]


def _copy_on_device(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(array) for array in arrays)


def have_room(arrays: Sequence[jax.Array]) -> bool:
    """Whether every device surely has memory for a copy of its shards beside all that training has used so far.

    What training uses is known from its peak, which says nothing before the first step has run: so the first question
    about a device is always answered with no. A device that does not tell its memory counts as full.
    """
    needed: dict[jax.Device, int] = defaultdict(int)
    for array in arrays:
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.addressable_devices:
            needed[device] += size
    asked_before = _measured.issuperset(needed)
    _measured.update(needed)
    return asked_before and all(_free_bytes(device.memory_stats()) >= size for device, size in needed.items())


def _free_bytes(statistics: dict[str, int] | None) -> float:
    if not statistics or not {"bytes_limit", "peak_bytes_in_use"} <= statistics.keys():
        return -1
    return statistics["bytes_limit"] * (1 - SPARE_FRACTION) - statistics["peak_bytes_in_use"]


class Ahead:
    """How much of one save may be on its way from the devices, or be there and not dropped yet, at a time.

    One that is asked for alone is always let through. Whoever asks holds `lock`; giving back needs none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.Lock()
        self._under_way = 0
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, nbytes: int) -> bool:
        """Count these bytes if there is room for them."""
        self._collect()
        has_room = self._under_way <= 0 or self._under_way + nbytes <= self.limit_bytes
        if has_room:
            self._under_way += nbytes
        return has_room

    def take_anyway(self, nbytes: int) -> None:
        """Count these bytes, which cannot wait."""
        self._collect()
        self._under_way += nbytes

    def _collect(self) -> None:
        while not self._dropped.empty():
            self._under_way -= self._dropped.get()

    def give_back(self, nbytes: int) -> None:
        """They are dropped; may be called by a finalizer, at any time on any thread."""
        self._dropped.put(nbytes)


class Transfers:
    """Arrays of one device each that are still to be brought to the host, in the order in which they were added.

    A fetch starts the transfers of the next arrays too, so that they run while others are written, as far as `ahead`
    lets them. Each array is let go of as soon as it was fetched.

    Attributes:
        done: open once nothing is read from the devices any more.
        fetching: how many fetches wait for their devices now, which may still be computing.
        waited_s: seconds that the devices were waited for while the arrays were added.
    """

    def __init__(
        self, ahead: Ahead, start: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = start_transfers
    ) -> None:
        self.done = Latch()
        self._ahead, self._start = ahead, start
        self._waiting: list[jax.Array | None] = []
        self._to_copy: set[int] = set()
        self._lock = ahead.lock
        self._left = self._next = self.fetching = 0
        self._is_given_up = False
        self.waited_s = 0.0

    def add(self, array: jax.Array, *, is_ours: bool = False) -> ArrayToCome | np.ndarray:
        """Add an array that lies on a single device; one without elements is here at once.

        Unless it is `is_ours`, which nobody else is given the memory of, an array on the host is copied by the fetch: a
        view of it would make a step fail that is given its memory.
        """
        if not array.size:
            return np.empty(array.shape, array.dtype)
        if not is_ours and is_on_host(array):
            self._to_copy.add(len(self._waiting))
        self._waiting.append(array)
        self._left += 1
        return ArrayToCome(self, len(self._waiting) - 1, array)

    def begin(self) -> None:
        """Start the first transfers, once all arrays are added."""
        if not self._left:
            self.done.open()
        with self._lock:
            self._start_more()

    def fetch(self, number: int) -> np.ndarray:
        """Bring array number `number` to the host, once; waits until it is there.

        Raises:
            CheckpointTimeoutError: it was let go of meanwhile.
        """
        with self._lock:
            array = self._waiting[number]
            if array is None:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._waiting[number] = None
            if number >= self._next:  # out of order
                self._ahead.take_anyway(array.nbytes)
                (array,) = self._start([array])
            self._start_more()
            self.fetching += 1
        try:
            data = np.array(array, copy=True) if number in self._to_copy else np.asarray(array)
            weakref.finalize(data, self._ahead.give_back, array.nbytes).atexit = False
        finally:
            with self._lock:
                self.fetching -= 1
        with self._lock:
            if self._is_given_up:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._left -= 1
            last = self._left == 0
        if last:
            self.done.open()
        return data

    def wait_for_devices(self) -> float:
        """Wait until the first array is computed, and here if its transfer was started; the seconds that it took.

        The devices run what they are given in order: nothing else is computed then that was queued before.
        """
        with self._lock:
            first = next((array for array in self._waiting if array is not None), None)
            self.fetching += 1
        try:
            return device_wait_s([] if first is None else [first])
        finally:
            with self._lock:
                self.fetching -= 1

    def give_up(self) -> bool:
        """See to it that a fetch fails, unless all are done; whether one will."""
        with self._lock:
            self._is_given_up = self._left > 0
        return self._is_given_up

    def close(self) -> None:
        """Let go of what was not fetched."""
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


class ArrayToCome:
    """An array that is fetched when its turn to be written comes; `store.layout.ArrayToCome` says what it promises."""

    def __init__(self, transfers: Transfers, number: int, array: jax.Array) -> None:
        self._transfers, self._number = transfers, number
        self.shape, self.dtype, self.size, self.nbytes = array.shape, np.dtype(array.dtype), array.size, array.nbytes

    def fetch(self) -> np.ndarray:
        """The data; may be called once, from any thread."""
        return self._transfers.fetch(self._number)


def take_from_devices(
    leaves: Sequence[jax.Array], mode: SnapshotMode, ahead: Ahead
) -> tuple[list[tuple[ChunkSource, ...]], Transfers]:
    """Take arrays of any devices as they are now; `snapshot` says what the modes are.

    Returns:
        The chunks of each array, and what brings those that are still to come.
    """
    copies = copies_if_wanted(leaves, mode)
    shards = [distinct_shards(leaf) for leaf in copies or leaves]
    handles: Sequence[jax.Array] = [own_handle(shard.data) for several in shards for shard in several]
    taken, transfers = take_handles(handles, mode, ahead, is_copied=copies is not None)
    data = iter(taken)
    chunks = [
        tuple(ChunkSource(box_from_index(shard.index, leaf.shape), next(data)) for shard in several)
        for leaf, several in zip(leaves, shards, strict=True)
    ]
    return chunks, transfers


def copies_if_wanted(leaves: Sequence[jax.Array], mode: SnapshotMode) -> list[jax.Array] | None:
    """Copies on the devices, if that is the way; None: it is not."""
    if mode == "device":
        return copy_on_devices(leaves)
    if mode == "auto" and have_room(leaves):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no room after all
            return copy_on_devices(leaves)
    return None


def take_handles(
    handles: Sequence[jax.Array], mode: SnapshotMode, ahead: Ahead, *, is_copied: bool
) -> tuple[list[np.ndarray | ArrayToCome], Transfers]:
    """The data of arrays of one device each, in their order, and what brings it."""
    is_bounded = is_copied or mode == "stream"
    transfers = Transfers(ahead if is_bounded else Ahead(sys.maxsize))
    turns = sorted(range(len(handles)), key=lambda number: alignment_class(handles[number].nbytes))
    ordered = [handles[number] for number in turns]
    if is_bounded:
        arrived = [transfers.add(handle, is_ours=is_copied) for handle in ordered]
    else:
        arrived = _order_now(transfers, ordered)
    taken = dict(zip(turns, arrived, strict=True))
    transfers.begin()
    return [taken[number] for number in range(len(handles))], transfers


def _order_now(transfers: Transfers, handles: Sequence[jax.Array]) -> list[np.ndarray | ArrayToCome]:
    """The data of all: on its way to pinned host memory, or here.

    What lies on the host already is copied: a view of it would make a step fail that is given its memory.
    """
    started = start_transfers(handles)
    unmoved = [handle for handle, array in zip(handles, started, strict=True) if array is handle]
    transfers.waited_s = device_wait_s(some_arrays(unmoved))
    there = [handle for handle in handles if is_on_host(handle)]
    copies = iter(copy_all(list(map(np.asarray, there))))
    data: list[np.ndarray | ArrayToCome] = []
    for handle, array in zip(handles, started, strict=True):
        if array is not handle:
            data.append(transfers.add(array, is_ours=True))
        else:
            data.append(next(copies) if is_on_host(handle) else np.asarray(handle))
    return data


def own_handle(data: jax.Array) -> jax.Array:
    """A shard's data as an object of ours: JAX keeps what was copied to the host with the object it was asked for."""
    own: jax.Array = data.addressable_data(0)
    return own


def distinct_shards(leaf: jax.Array) -> list[jax.Shard]:
    """One shard of each part of an array that lies on devices of this process."""
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
