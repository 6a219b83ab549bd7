"""Lets the hosts of a single-controller runtime write and read what their devices hold.

For a save, `HostSnapshot` copies arrays to the memory of the hosts, and `write_on_hosts` lets each host write its part
and merges the results. For a load, `HostReads` lets the hosts read, and makes arrays from the boxes where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.pytree.colocated.calls import (
    HostCall,
    call_hosts,
    cpu_device_of,
    refuse_without_pickler,
)
from jaxckpt_train.pytree.colocated.host import (
    ReadArray,
    ReadPlan,
    UnseenError,
    WritePlan,
    WrittenArray,
    error_room,
    plan_array,
    room_for_index,
    settings_there,
)
from jaxckpt_train.pytree.copies import device_wait_s, runs_on_hosts
from jaxckpt_train.pytree.partition import HeldBox, WriteAssignment, cut_out
from jaxckpt_train.pytree.placing import ArrayLoad
from jaxckpt_train.settings import MIB, Colocated, StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, box_shape, full_box, intersect, slices_within
from jaxckpt_train.store.committed import Committed, check_unchanged
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.manifest import PartRecord, SegmentRecord
from jaxckpt_train.store.process_index import PartIndex, ProcessIndex, index_summary, merge_indexes
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.segment import ArraySource
from jaxckpt_train.store.writer import Progress, WrittenArrays

LEAST_CUT_BYTES = 64 * MIB
"""Smaller parts are not cut: JAX compiles each cut for each shape and device, in the thread that starts a save."""


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
        """Return the arrays in the order of the loads; none of their bytes passes through this process.

        Raises:
            The error of a host, of the same class; names the host.
            CheckpointError: a host does not find this checkpoint.
        """
        batches, report = self._batches(), progress or (lambda done: None)
        calls = [self._make_call(device, reads) for device, reads in batches]
        each = call_hosts(calls, f"loading {self._committed.directory}", lambda moved: report(0))
        try:
            with contextlib.closing(each) as results:
                for result in results:
                    self._place(batches[result.number][1], result.arrays)
                    report(result.answer.done_bytes)
                    del result  # the host can release what it has read
        except UnseenError as error:
            check_unchanged(self._files, self._committed, may_be_gone=False)
            raise CheckpointError(
                f"{error}: this process has opened the checkpoint, but that host finds none, or another one; load it "
                "from storage that the controller and all hosts share"
            ) from error
        return [self._assembled(load, shards) for load, shards in zip(self._loads, self._shards, strict=True)]

    def _batches(self) -> list[tuple[jax.Device, list[_Read]]]:
        """Return what each call reads, and its CPU device: first calls of all devices, then second calls, and so on."""
        batches: dict[jax.Device, list[list[_Read]]] = {}
        sizes: dict[jax.Device, int] = {}
        for read in self._assigned_reads():
            cpu = cpu_device_of(read.device)
            if cpu not in batches or sizes[cpu] + read.nbytes > self._settings.read_budget_bytes:
                batches.setdefault(cpu, []).append([])
                sizes[cpu] = 0
            batches[cpu][-1].append(read)
            sizes[cpu] += read.nbytes
        turns = itertools.zip_longest(*([(cpu, reads) for reads in several] for cpu, several in batches.items()))
        return [call for turn in turns for call in turn if call is not None]

    def _assigned_reads(self) -> Iterator[_Read]:
        """Assign each box to a device that needs it: the one with the fewest bytes so far."""
        loads: Counter[jax.Device] = Counter()
        for number, (_, _, _, place, _) in enumerate(self._loads):
            assert place.sharding is not None
            for at, box in enumerate(place.boxes):
                holder = min((device for device, held in place.devices if held == at), key=loads.__getitem__)
                read = _Read(number, box, holder, place.sharding.memory_kind, self._loads[number].dtype)
                loads[holder] += read.nbytes
                yield read

    def _make_call(self, cpu: jax.Device, reads: Sequence[_Read]) -> HostCall:
        by_array: dict[int, list[Box]] = {}  # in the order of the reads, which is the order of the arrays
        for read in reads:
            by_array.setdefault(read.number, []).append(read.box)
        manifest, room = self._committed.manifest, error_room()
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

    def _assembled(self, load: ArrayLoad, shards: dict[jax.Device, jax.Array]) -> jax.Array:
        shape, sharding = load.placement.shape, load.placement.sharding
        assert sharding is not None
        in_order = [shards.pop(device) for device, _ in load.placement.devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, in_order)


class HostPart(NamedTuple):
    """A part of array number `array` of a tree, which a CPU device holds."""

    array: int
    box: Box
    data: jax.Array


class HostParts:
    """The parts of one tree that hosts write.

    Args:
        whole: copies of arrays, each of whose shards is a part, with their numbers in the tree.
        apart: other parts, with the CPU devices that hold them.

    `is_waiting`: whether a thread waits for the copies, which the devices may compute for long.
    """

    def __init__(self, whole: Sequence[tuple[int, jax.Array]], apart: Sequence[tuple[jax.Device, HostPart]]) -> None:
        self._whole, self._apart = whole, apart
        self.is_waiting = False

    def by_device(self) -> dict[jax.Device, list[HostPart]]:
        """Return the parts that each CPU device holds, ordered by device number; waits until all are computed."""
        found: dict[jax.Device, list[HostPart]] = {}
        for number, array in self._whole:
            for shard in array.addressable_shards:
                part = HostPart(number, box_from_index(shard.index, array.shape), shard.data)
                found.setdefault(shard.device, []).append(part)
        for device, part in self._apart:
            found.setdefault(device, []).append(part)
        with self._waiting():
            for part in itertools.chain.from_iterable(found.values()):
                part.data.block_until_ready()
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def wait_for_devices(self) -> float:
        """Wait until the first copy is computed; return the seconds."""
        first = [array for _, array in self._whole[:1]] or [part.data for _, part in self._apart[:1]]
        with self._waiting():
            return device_wait_s(first)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def close(self) -> None:
        """Release the parts."""
        self._whole = self._apart = ()


class HostSnapshot:
    """Collects the leaves of one tree that hosts write, as selected by `setting`, and distributes them."""

    def __init__(self, setting: Colocated) -> None:
        refuse_without_pickler()  # here, because the background thread could raise it only later
        self._setting = setting
        self._whole: list[tuple[int, jax.Array, jax.sharding.Sharding]] = []
        self._found: list[tuple[jax.Device, HostPart]] = []
        self._assignment = WriteAssignment(0, LEAST_CUT_BYTES)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], Sequence[HeldBox]] = {}
        self._host_shardings: dict[jax.sharding.Sharding, jax.sharding.Sharding | None] = {}

    def accepts(self, sharding: jax.sharding.Sharding) -> bool:
        """Return whether hosts write arrays of this sharding."""
        return runs_on_hosts(sharding, self._setting)

    def add(self, number: int, leaf: jax.Array) -> None:
        """Add a leaf: every part once, from the holder with the fewest bytes so far.

        Parts are sliced on their device, so that only they are transferred.
        """
        layout = self._layout(leaf.sharding, leaf.shape)
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
        """Start the copies of all added leaves; None: there are none.

        Whole arrays are copied in one call: JAX takes as long for an array as for one part.
        """
        if not (self._whole or self._found):
            return None
        copies = iter(
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

    def _layout(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Sequence[HeldBox]:
        if (sharding, shape) not in self._layouts:
            holders: dict[Box, set[int]] = {}
            devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in devices.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                holders.setdefault(box, set()).add(device.id)
            self._layouts[sharding, shape] = [HeldBox(box, tuple(sorted(ids))) for box, ids in holders.items()]
        return self._layouts[sharding, shape]


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
    """Write the arrays of one checkpointable on the hosts that hold them; the files are the same as of any save.

    Args:
        directory: the attempt; the folder `name` exists in it.
        name: of the checkpointable.
        arrays: all of its arrays.
        parts: what the hosts write.
        own: what this process has written, with numbers of segments that follow `before`.
        before: the segments that the manifest already has.
        settings: how.
        progress: called when a host has made progress.

    Raises:
        The error of a host, of the same class; names the host.
        CheckpointError: a host does not find the controller's directory.
    """
    by_device = parts.by_device()
    progress(0)
    calls = [
        _make_call(directory, name, arrays, writer, held, settings, device)
        for writer, (device, held) in enumerate(by_device.items(), 1)
    ]
    del by_device
    indexes: list[PartIndex] = [PartIndex((), (), ())] * len(calls)

    def report_progress(moved: bool) -> None:
        if moved:
            progress(0)

    with contextlib.closing(call_hosts(calls, f"saving {name} to {directory}", report_progress)) as results:
        for number, answer, _ in results:
            assert answer.index is not None
            indexes[number] = answer.index
            progress(answer.done_bytes)
    return _merge(name, own, before, indexes)


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


def _merge(
    name: str, own: WrittenArrays, before: Sequence[SegmentRecord], indexes: Sequence[PartIndex]
) -> WrittenArrays:
    """Merge everything, and check that it is complete."""
    bare = tuple(msgspec.structs.replace(array, chunks=()) for array in own.arrays)
    written = tuple(number for number, array in enumerate(own.arrays) if array.chunks)
    mine = PartIndex((*before, *own.segments), written, tuple(own.arrays[number].chunks for number in written))
    everyone = [index_summary(ProcessIndex("", (index,))) for index in (mine, *indexes)]
    segments, (part,) = merge_indexes([PartRecord(name, "", bare, (), msgspec.Raw(b"null"))], everyone)
    return WrittenArrays(tuple(segments[len(before) :]), part.arrays)
