"""Lets the hosts of a single-controller runtime write and read what their devices hold.

For a save, `HostSnapshot` copies arrays to the memory of the hosts, and `write_on_hosts` lets each host write its part.
For a load, `HostReads` lets the hosts read. JAX's Colocated Python sends functions by their names, in a pickle that
only JAX makes and reads; it contains no part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jaxckpt_train.distributed.rendezvous import decode_error
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    NotACheckpointError,
    OtherProcessError,
    SettingsError,
)
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.pytree.colocated.host import (
    Answer,
    ReadArray,
    ReadPlan,
    WritePlan,
    WrittenArray,
    answer_room,
    decode_answer,
    moved_here,
    plan_array,
    read_here,
    room_for_index,
    settings_there,
    write_here,
)
from jaxckpt_train.pytree.copies import Busy, device_wait_s, runs_on_hosts
from jaxckpt_train.pytree.partition import KEPT_LAYOUTS, HeldBox, WriteAssignment, cut_out, held_boxes
from jaxckpt_train.pytree.placing import ArrayLoad
from jaxckpt_train.settings import MIB, Colocated, StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, box_shape, intersect, slices_within
from jaxckpt_train.store.committed import Committed, check_unchanged
from jaxckpt_train.store.manifest import PartRecord, SegmentRecord
from jaxckpt_train.store.process_index import PartIndex, ProcessIndex, merge_indexes, part_index
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.segment import ArraySource, dtype_name
from jaxckpt_train.store.threads import POLL_S, Latch, shared_workers
from jaxckpt_train.store.writer import Progress, WrittenArrays

# Smaller parts are not cut: JAX compiles each cut for each shape and device, in the thread that starts a save.
LEAST_CUT_BYTES = 64 * MIB
MOST_AT_ONCE = 64
_spec: Any = jax.ShapeDtypeStruct
_NOTHING = np.zeros(1, np.uint8)
Kind = tuple[tuple[int, ...], str]  # shape and dtype of an array


class _Read(NamedTuple):
    """A box of array number `number`, which is read on the host of `device`."""

    number: int
    box: Box
    device: jax.Device
    memory: str | None
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return box_elements(self.box) * self.dtype.itemsize


class HostReads:
    """Loads arrays: each box is read once, on the host of one device that needs it, and copied to the other devices.

    A call to a host reads at most `read_budget_bytes` (or one box), which leave the memory of the host before much more
    arrives. All devices belong to hosts of one single-controller runtime.
    """

    def __init__(
        self, files: Opener, committed: Committed, settings: StoreSettings, loads: Sequence[ArrayLoad]
    ) -> None:
        self._files, self._committed, self._settings, self._loads = files, committed, settings, loads
        self._shards: list[dict[jax.Device, jax.Array]] = [{} for _ in loads]

    def load(self, progress: ReadProgress | None) -> list[jax.Array]:
        """Return the arrays in the order of the loads; none of their bytes passes through this process."""
        batches = self._batches()
        calls = [self._make_call(device, reads) for device, reads in batches]
        each = call_hosts(calls, f"loading {self._committed.directory}")
        try:
            with contextlib.closing(each) as results:
                for result in results:
                    self._place(batches[result.number][1], result.arrays)
                    if progress is not None:
                        progress(result.answer.done_bytes)
                    del result  # the host can release what it has read
        except NotACheckpointError as error:
            check_unchanged(self._files, self._committed, may_be_gone=False)
            raise CheckpointError(str(error)) from error
        loaded = list[jax.Array]()
        for load, shards in zip(self._loads, self._shards, strict=True):
            place = load.placement
            assert place.sharding is not None
            in_order = [shards.pop(device) for device, _ in place.devices]
            loaded.append(jax.make_array_from_single_device_arrays(place.shape, place.sharding, in_order))
        return loaded

    def _batches(self) -> list[tuple[jax.Device, list[_Read]]]:
        """Return what each call reads, and its CPU device; a box is read for a device with the fewest bytes so far."""
        loads: Counter[jax.Device] = Counter()
        batches: dict[jax.Device, list[list[_Read]]] = {}
        sizes: dict[jax.Device, int] = {}
        for number, load in enumerate(self._loads):
            place = load.placement
            assert place.sharding is not None
            for at, box in enumerate(place.boxes):
                holder = min((device for device, held in place.devices if held == at), key=loads.__getitem__)
                read = _Read(number, box, holder, place.sharding.memory_kind, load.dtype)
                loads[holder] += read.nbytes
                cpu = cpu_device_of(holder)
                if cpu not in batches or sizes[cpu] + read.nbytes > self._settings.read_budget_bytes:
                    batches.setdefault(cpu, []).append([])
                    sizes[cpu] = 0
                batches[cpu][-1].append(read)
                sizes[cpu] += read.nbytes
        return [(cpu, reads) for cpu, several in batches.items() for reads in several]

    def _make_call(self, cpu: jax.Device, reads: Sequence[_Read]) -> HostCall:
        by_array: dict[int, list[Box]] = {}  # in the order of the reads, which is the order of the arrays
        for read in reads:
            by_array.setdefault(read.number, []).append(read.box)
        manifest, room = self._committed.manifest, answer_room()
        plan = ReadPlan(
            os.fsencode(self._committed.directory),
            self._committed.manifest_sha256,
            manifest.digest,
            manifest.block_bytes,
            settings_there(self._settings),
            manifest.segments,
            tuple(self._wanted(self._loads[number], boxes) for number, boxes in by_array.items()),
        )
        kinds = tuple((box_shape(read.box), dtype_name(read.dtype)) for read in reads)
        return HostCall(cpu, plan_array(plan, room), (), room, kinds)

    def _wanted(self, load: ArrayLoad, boxes: Sequence[Box]) -> ReadArray:
        chunks = tuple(each for each in load.array.chunks if any(intersect(each.box, box) is not None for box in boxes))
        record = msgspec.structs.replace(load.array, chunks=chunks, sharding=None)
        return ReadArray(record, tuple(boxes), dtype_name(load.dtype))

    def _place(self, reads: Sequence[_Read], arrays: Sequence[jax.Array]) -> None:
        """Put what a host has read onto the device of each read, and from there onto the other devices."""
        owners = self._put(reads, arrays, [read.device for read in reads])
        remaining = [
            (read, data, device)
            for read, data in zip(reads, owners, strict=True)
            for device, held in self._loads[read.number].placement.devices
            if device != read.device and self._loads[read.number].placement.boxes[held] == read.box
        ]
        if remaining:
            others, data, devices = zip(*remaining, strict=True)
            self._put(others, data, devices)

    def _put(
        self, reads: Sequence[_Read], data: Sequence[jax.Array], devices: Sequence[jax.Device]
    ) -> Sequence[jax.Array]:
        places = [
            jax.sharding.SingleDeviceSharding(device, memory_kind=read.memory)
            for read, device in zip(reads, devices, strict=True)
        ]
        put: list[jax.Array] = jax.device_put(list(data), places)
        for read, device, shard in zip(reads, devices, put, strict=True):
            self._shards[read.number][device] = shard
        return put


class HostPart(NamedTuple):
    """A part of array number `array` of a tree, which a CPU device holds."""

    array: int
    box: Box
    data: jax.Array


class HostParts:
    """The parts of one tree that hosts write: numbered whole arrays, and parts with the devices that hold them."""

    def __init__(self, whole: Sequence[tuple[int, jax.Array]], apart: Sequence[tuple[jax.Device, HostPart]]) -> None:
        self._whole, self._apart = whole, apart
        self.busy = Busy()  # with waits for the copies

    def by_device(self) -> dict[jax.Device, list[HostPart]]:
        """Return the parts that each CPU device holds, ordered by device number; waits until all are computed."""
        found: dict[jax.Device, list[HostPart]] = {}
        for number, array in self._whole:
            for shard in array.addressable_shards:
                part = HostPart(number, box_from_index(shard.index, array.shape), shard.data)
                found.setdefault(shard.device, []).append(part)
        for device, part in self._apart:
            found.setdefault(device, []).append(part)
        with self.busy:
            for part in itertools.chain.from_iterable(found.values()):
                part.data.block_until_ready()
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def wait_for_devices(self) -> float:
        """Wait until the first copy is computed; return the seconds."""
        first = [array for _, array in self._whole[:1]] or [part.data for _, part in self._apart[:1]]
        with self.busy:
            return device_wait_s(first)

    def close(self) -> None:
        """Release the parts."""
        self._whole = self._apart = ()


@functools.lru_cache(KEPT_LAYOUTS)
def _device_layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Sequence[HeldBox]:
    return held_boxes(sharding, shape, operator.attrgetter("id"))


class HostSnapshot:
    """Collects the leaves of one tree that hosts write, as selected by `setting`, and distributes them."""

    def __init__(self, setting: Colocated) -> None:
        refuse_without_pickler()  # here, because the background thread could raise it only later
        self._setting = setting
        self._whole: list[tuple[int, jax.Array, jax.sharding.Sharding]] = []
        self._found: list[tuple[jax.Device, HostPart]] = []
        self._assignment = WriteAssignment(0, LEAST_CUT_BYTES)
        self._host_shardings: dict[jax.sharding.Sharding, jax.sharding.Sharding | None] = {}

    def accepts(self, sharding: jax.sharding.Sharding) -> bool:
        """Return whether hosts write arrays of this sharding."""
        return runs_on_hosts(sharding, self._setting)

    def add(self, number: int, leaf: jax.Array) -> None:
        """Add a leaf: every part once, from the holder with the fewest bytes so far, sliced on its device."""
        layout = _device_layout(leaf.sharding, leaf.shape)
        if all(len(held.holders) == 1 for held in layout):
            host_sharding = self._host_sharding(leaf.sharding)
            if host_sharding is not None:
                self._whole.append((number, leaf, host_sharding))
                return
        here = {shard.device.id: shard for shard in leaf.addressable_shards}
        for holder, (held, box) in self._assignment.of_all(layout, np.dtype(leaf.dtype).itemsize):
            data, whole = here[holder].data, layout[held].box
            part = data if box == whole else cut_out(data, slices_within(box, whole))
            self._found.append((cpu_device_of(here[holder].device), HostPart(number, box, part)))

    def finish(self) -> HostParts | None:
        """Start the copies of all added leaves; None: there are none."""
        if not (self._whole or self._found):
            return None
        copies = iter(  # in one call: JAX takes as long for a whole array as for one part
            jax.device_put(
                [leaf for _, leaf, _ in self._whole] + [part.data for _, part in self._found],
                [sharding for *_, sharding in self._whole]
                + [jax.sharding.SingleDeviceSharding(device) for device, _ in self._found],
                may_alias=False,
            )
        )
        whole = [(number, next(copies)) for number, *_ in self._whole]
        apart = [(device, part._replace(data=next(copies))) for device, part in self._found]
        self._whole.clear()
        self._found.clear()
        return HostParts(whole, apart)

    def _host_sharding(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
        """Return the sharding over the hosts' CPU devices; None: two devices share one, or there is no mesh."""
        if sharding not in self._host_shardings:
            self._host_shardings[sharding] = None
            if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
                mesh = sharding.mesh
                host_sharding = [cpu_device_of(device) for device in mesh.devices.flat]
                if len(set(host_sharding)) == len(host_sharding):
                    devices = np.array(host_sharding).reshape(mesh.devices.shape)
                    there = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
                    self._host_shardings[sharding] = jax.sharding.NamedSharding(there, sharding.spec)
        return self._host_shardings[sharding]


def write_on_hosts(
    directory: str,
    name: str,
    arrays: Sequence[ArraySource],
    parts: HostParts,
    own: WrittenArrays,
    before: Sequence[SegmentRecord],
    settings: StoreSettings,
    progress: Progress,
) -> WrittenArrays:
    """Write the arrays of one checkpointable on the hosts; this process has written `own`, after segments `before`."""
    by_device = parts.by_device()
    progress(0)
    calls = [
        _make_call(directory, name, arrays, writer, held, settings, device)
        for writer, (device, held) in enumerate(by_device.items(), 1)
    ]
    del by_device
    indexes: list[PartIndex] = [part_index()] * len(calls)
    each = call_hosts(calls, f"saving {name} to {directory}", functools.partial(progress, 0))
    with contextlib.closing(each) as results:
        for number, answer, _ in results:
            assert answer.index is not None
            indexes[number] = answer.index
            progress(answer.done_bytes)
    bare = tuple(msgspec.structs.replace(array, chunks=()) for array in own.arrays)
    written = {number: array.chunks for number, array in enumerate(own.arrays) if array.chunks}
    mine = part_index((*before, *own.segments), written)
    everyone = [ProcessIndex("", (index,)) for index in (mine, *indexes)]
    # This checks that the arrays are complete.
    segments, (part,) = merge_indexes([PartRecord(name, "", bare, (), msgspec.Raw(b"null"))], everyone)
    return WrittenArrays(tuple(segments[len(before) :]), part.arrays)


def _make_call(
    directory: str,
    name: str,
    arrays: Sequence[ArraySource],
    writer: int,
    parts: Sequence[HostPart],
    settings: StoreSettings,
    device: object,
) -> HostCall:
    numbers = sorted({part.array for part in parts})
    places = {number: place for place, number in enumerate(numbers)}
    plan = WritePlan(
        os.fsencode(directory),
        name,
        writer,
        settings_there(settings),
        tuple(
            WrittenArray(number, arrays[number].name, arrays[number].shape, dtype_name(np.dtype(arrays[number].dtype)))
            for number in numbers
        ),
        tuple(places[part.array] for part in parts),
        tuple(part.box for part in parts),
    )
    held = [part.data for part in parts]
    room = room_for_index(plan, [array.nbytes for array in held])
    return HostCall(device, plan_array(plan, room), held, room)


@functools.cache
def cpu_device_of(device: jax.Device) -> jax.Device:
    """Return the CPU device on the host of a device: a call with arrays on it runs on that host."""
    if device.device_kind == "cpu":
        return device  # for a CPU device, JAX 0.10 may name another one of the same process
    from jax.experimental import colocated_python

    try:
        (found,) = colocated_python.colocated_cpu_devices((device,))
    except (ValueError, AttributeError, RuntimeError) as error:
        raise SettingsError(
            f"{device}: its runtime shows no CPU device on the same host ({error}), so nothing can run there; start it "
            "with Colocated Python, or transfer all arrays through this process with StoreSettings(colocated=False)"
        ) from error
    return found


class HostCall(NamedTuple):
    """A call on the host of a CPU device, with an answer of `room` bytes, and arrays of `kinds` (None: it writes)."""

    device: jax.Device
    plan: np.ndarray
    arrays: Sequence[jax.Array]
    room: int
    kinds: tuple[Kind, ...] | None = None


class HostResult(NamedTuple):
    """The answer to call number `number`, and arrays on its CPU device."""

    number: int
    answer: Answer
    arrays: Sequence[jax.Array]


def call_hosts(
    calls: Sequence[HostCall], doing: str, on_progress: Callable[[], object] | None = None
) -> Generator[HostResult]:
    """Make all calls in rounds of one for each host, and yield the results as they arrive.

    A round starts after all results of the last one were taken, so that a host has memory for one call only. After the
    first error, which names the host, no further call is started. `on_progress` is called when a host has made
    progress; if none has for ten minutes, CheckpointTimeoutError is raised.
    """
    refuse_without_pickler()
    by_device: dict[jax.Device, list[int]] = {}
    for number, each in enumerate(calls):
        by_device.setdefault(each.device, []).append(number)
    under_way: dict[int, jax.Device] = {}

    def call(number: int) -> HostResult:
        under_way[number] = calls[number].device
        try:
            with enable_x64(True):  # the calling thread may have it for itself only
                return _call_host(number, calls[number], doing)
        finally:
            del under_way[number]

    poller, seen = ProgressPoller(under_way), [0]

    def moved() -> int:
        before, seen[0] = seen[0], poller.moves
        if on_progress is not None and seen[0] != before:
            on_progress()
        return seen[0]

    workers = shared_workers(min(len(by_device), MOST_AT_ONCE), "jaxckpt-hosts")
    try:
        with poller:
            for numbers in itertools.zip_longest(*by_device.values()):
                together = [number for number in numbers if number is not None]
                with contextlib.closing(workers.run_each(call, together, moved=moved)) as results:
                    yield from results
    except CheckpointTimeoutError as error:
        raise CheckpointTimeoutError(f"{doing}: {error}") from None


class ProgressPoller:
    """Asks hosts with running calls for their progress on a thread; `moves` changes whenever one has made progress."""

    def __init__(self, under_way: dict[int, jax.Device]) -> None:
        self._under_way, self._seen = under_way, dict[jax.Device, bytes]()
        self.moves = 0
        self._is_over = Latch()

    def __enter__(self) -> ProgressPoller:
        # Without a thread, a slow host cannot be distinguished from a stopped one.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="jaxckpt-hosts-asked", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.open()

    def _run(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.ask()

    def ask(self) -> int:
        """Ask the hosts; return `moves`."""
        for device in list(self._under_way.values()):
            try:
                found = np.asarray(_colocated(moved_here, 8)(jax.device_put(_NOTHING, device))[0]).tobytes()
            except jax.errors.JaxRuntimeError:
                continue  # the host's own call will raise it
            if self._seen.get(device) != found:
                self._seen[device] = found
                self.moves += 1
        return self.moves


def _call_host(number: int, call: HostCall, doing: str) -> HostResult:
    try:
        work: Any = write_here if call.kinds is None else read_here
        plan = jax.device_put(call.plan, call.device)
        encoded, *arrays = _colocated(work, call.room, call.kinds)(plan, *call.arrays)
        answer = decode_answer(np.asarray(encoded))  # waits until it is there
    except (jax.errors.JaxRuntimeError, ImportError) as error:
        raise OtherProcessError(
            f"the host of {call.device}, {doing}: {error}; check that all hosts are alive, run Colocated Python, and "
            "have the same releases of JAX, cloudpickle and jaxckpt_train as this process; "
            "StoreSettings(colocated=False) needs none of this, and transfers all arrays through this process"
        ) from error
    who = f"host {answer.host} (of {call.device}, process {answer.pid})"
    if answer.error is not None:
        raise decode_error(answer.error, doing, who)
    return HostResult(number, answer, arrays)


@functools.lru_cache(128)
def _colocated(
    function: Callable[..., Any], answer_bytes: int, kinds: tuple[Kind, ...] | None = None
) -> Callable[..., tuple[jax.Array, ...]]:
    """Wrap a function so that it runs on the host of its first argument, and returns an answer and arrays there."""
    from jax.experimental import colocated_python

    def outputs(plan: jax.ShapeDtypeStruct, *others: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        every = (((answer_bytes,), "uint8"), *(kinds or ()))
        return tuple(_spec(shape, dtype, sharding=plan.sharding) for shape, dtype in every)

    calling: Any = colocated_python.colocated_python(
        function if kinds is None else functools.partial(function, shapes=kinds)
    )
    made: Callable[..., tuple[jax.Array, ...]] = calling.specialize(out_specs_fn=outputs)
    return made


def refuse_without_pickler() -> None:
    """Raise SettingsError if cloudpickle, which Colocated Python needs, is not installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401  # JAX sends functions with it
    except ImportError as error:
        raise SettingsError(
            "StoreSettings.colocated: JAX's Colocated Python needs the package cloudpickle, here and on the hosts: pip "
            'install "jaxckpt-train[colocated]"; or transfer all arrays through this process with '
            "StoreSettings(colocated=False)"
        ) from error
