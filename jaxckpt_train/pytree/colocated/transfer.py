"""Has the hosts of a single-controller runtime write what they hold of a checkpointable, and joins what they wrote.

Takes arrays for the hosts that hold them: each gets copies of its share in its own memory.

Has the hosts of a single-controller runtime read what their devices need, and makes arrays of it where it lies.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
    HostResult,
    Kind,
    call_hosts,
    cpu_device_of,
    has_single_controller,
    refuse_without_pickler,
    runs_on_hosts,
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
from jaxckpt_train.pytree.copies import device_wait_s
from jaxckpt_train.pytree.partition import HeldBox, WriteAssignment, cut_out
from jaxckpt_train.pytree.target import Placement
from jaxckpt_train.settings import MIB, Colocated, StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, box_shape, full_box, intersect, slices_within
from jaxckpt_train.store.committed import Committed, check_unchanged
from jaxckpt_train.store.dtypes import DTYPES, dtype_name
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord, SegmentRecord
from jaxckpt_train.store.process_index import PartIndex, ProcessIndex, index_summary, merge_indexes
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.segment import ArraySource
from jaxckpt_train.store.writer import Progress, WrittenArrays

LEAST_CUT_BYTES = 64 * MIB
"""What is smaller is not cut: JAX compiles each cut for each shape and device, on the thread that calls for a save."""


class HostLeaf(NamedTuple):
    """An array to load: its record, where it goes, and the dtype that it becomes."""

    record: ArrayRecord
    placement: Placement
    dtype: np.dtype


class _Read(NamedTuple):
    """Box number `box` of leaf number `leaf`, read beside `device`."""

    leaf: int
    box: int
    device: jax.Device


class HostReads:
    """Loads leaves: each box is read once, on the host of one device that needs it, and copied to the others.

    A call to a host reads at most `read_budget_bytes` (or one box), which leave its memory before much more comes.

    Args:
        files: where this process has opened the checkpoint.
        committed: the opened checkpoint.
        settings: how the hosts read.
        leaves: what; all of their devices are of hosts of one single-controller runtime.
    """

    def __init__(
        self, files: Opener, committed: Committed, settings: StoreSettings, leaves: Sequence[HostLeaf]
    ) -> None:
        self._files, self._committed, self._settings, self._leaves = files, committed, settings, leaves
        self._shards: list[dict[jax.Device, jax.Array]] = [{} for _ in leaves]

    def load(self, progress: ReadProgress | None) -> list[jax.Array]:
        """The arrays, in the order of the leaves, none of whose bytes came through this process.

        Raises:
            What a host met, of the same class, named by the host.
            CheckpointError: a host does not see this checkpoint.
        """
        batches = self._batches()
        calls = [self._call(device, reads) for device, reads in batches]

        def looked(moved: bool) -> None:
            if progress is not None:
                progress(0)

        try:
            with contextlib.closing(call_hosts(calls, f"loading {self._committed.directory}", looked)) as results:
                for result in results:
                    self._spread(batches[result.number][1], result)
                    if progress is not None:
                        progress(result.answer.done_bytes)
                    del result  # the host may let go of what it has read
        except UnseenError as error:
            check_unchanged(self._files, self._committed, may_be_gone=False)
            raise CheckpointError(
                f"{error}: this process sees the checkpoint there, but that host sees none, or another one; it is "
                "loaded from storage that the controller and all hosts share"
            ) from error
        return [self._assembled(leaf, shards) for leaf, shards in zip(self._leaves, self._shards, strict=True)]

    def _batches(self) -> list[tuple[jax.Device, list[_Read]]]:
        """What each call reads, and of which CPU device it is: the first calls of all devices, then their second."""
        batches: dict[jax.Device, list[list[_Read]]] = {}
        sizes: dict[jax.Device, int] = {}
        for read in self._shared_out():
            cpu, size = cpu_device_of(read.device), self._bytes(read)
            if cpu not in batches or sizes[cpu] + size > self._settings.read_budget_bytes:
                batches.setdefault(cpu, []).append([])
                sizes[cpu] = 0
            batches[cpu][-1].append(read)
            sizes[cpu] += size
        turns = itertools.zip_longest(*([(cpu, reads) for reads in several] for cpu, several in batches.items()))
        return [call for turn in turns for call in turn if call is not None]

    def _shared_out(self) -> Iterator[_Read]:
        """Each box, and the device that it is read beside: of those that need it the one with the fewest bytes yet."""
        loads: Counter[jax.Device] = Counter()
        for number, leaf in enumerate(self._leaves):
            holders: list[list[jax.Device]] = [[] for _ in leaf.placement.boxes]
            for device, box in leaf.placement.devices:
                holders[box].append(device)
            for box, devices in enumerate(holders):
                read = _Read(number, box, min(devices, key=loads.__getitem__))
                loads[read.device] += self._bytes(read)
                yield read

    def _bytes(self, read: _Read) -> int:
        leaf = self._leaves[read.leaf]
        return box_elements(leaf.placement.boxes[read.box]) * leaf.dtype.itemsize

    def _call(self, cpu: jax.Device, reads: Sequence[_Read]) -> HostCall:
        by_leaf: dict[int, list[Box]] = {}  # in the order of the reads, which is that of the leaves
        for read in reads:
            by_leaf.setdefault(read.leaf, []).append(self._leaves[read.leaf].placement.boxes[read.box])
        manifest = self._committed.manifest
        plan = ReadPlan(
            os.fsencode(self._committed.directory),
            self._committed.manifest_sha256,
            manifest.digest,
            manifest.block_bytes,
            settings_there(dataclasses.asdict(self._settings)),
            manifest.segments,
            tuple(self._wanted(self._leaves[number], boxes) for number, boxes in by_leaf.items()),
        )
        kinds = tuple(self._kind(self._leaves[number], box) for number, boxes in by_leaf.items() for box in boxes)
        room = error_room()
        return HostCall(cpu, plan_array(plan, room), (), room, kinds)

    def _wanted(self, leaf: HostLeaf, boxes: Sequence[Box]) -> ReadArray:
        chunks = tuple(
            chunk for chunk in leaf.record.chunks if any(intersect(chunk.box, box) is not None for box in boxes)
        )
        record = msgspec.structs.replace(leaf.record, chunks=chunks, sharding=None)
        return ReadArray(record, tuple(boxes), dtype_name(leaf.dtype))

    def _kind(self, leaf: HostLeaf, box: Box) -> Kind:
        return box_shape(box), dtype_name(leaf.dtype)

    def _spread(self, reads: Sequence[_Read], result: HostResult) -> None:
        """Put what a host has read onto the device that it was read beside, and from there onto the others."""
        owners = self._put(reads, result.arrays, [read.device for read in reads])
        further = [
            (read, data, device)
            for read, data in zip(reads, owners, strict=True)
            for device, box in self._leaves[read.leaf].placement.devices
            if box == read.box and device != read.device
        ]
        if further:
            others, data, devices = zip(*further, strict=True)
            self._put(others, data, devices)

    def _put(
        self, reads: Sequence[_Read], data: Sequence[jax.Array], devices: Sequence[jax.Device]
    ) -> Sequence[jax.Array]:
        places = [
            jax.sharding.SingleDeviceSharding(device, memory_kind=self._memory(read))
            for read, device in zip(reads, devices, strict=True)
        ]
        put: list[jax.Array] = jax.device_put(list(data), places)
        for read, device, shard in zip(reads, devices, put, strict=True):
            self._shards[read.leaf][device] = shard
        return put

    def _memory(self, read: _Read) -> str | None:
        sharding = self._leaves[read.leaf].placement.sharding
        assert sharding is not None
        return sharding.memory_kind

    def _assembled(self, leaf: HostLeaf, shards: dict[jax.Device, jax.Array]) -> jax.Array:
        sharding = leaf.placement.sharding
        assert sharding is not None
        in_order = [shards.pop(device) for device, _ in leaf.placement.devices]
        return jax.make_array_from_single_device_arrays(leaf.placement.shape, sharding, in_order)


def dtype_of(record: ArrayRecord, wanted: np.dtype | None) -> np.dtype:
    """The dtype that a stored array becomes."""
    return DTYPES[record.dtype] if wanted is None else wanted


class HostPart(NamedTuple):
    """A part of array number `array` of a tree, held by a CPU device."""

    array: int
    box: Box
    data: jax.Array


class HostParts:
    """What the hosts have of one tree.

    Args:
        whole: copies of arrays each of whose shards is a part, with their numbers in the tree.
        apart: further parts, by the CPU device that holds them.

    Attributes:
        is_waiting: whether somebody waits until they are there, which the devices may compute for long.
    """

    def __init__(self, whole: Sequence[tuple[int, jax.Array]], apart: Sequence[tuple[jax.Device, HostPart]]) -> None:
        self._whole, self._apart = whole, apart
        self.is_waiting = False

    def by_device(self) -> dict[jax.Device, list[HostPart]]:
        """The parts that each CPU device holds, by its number; waits until all are there."""
        found: dict[jax.Device, list[HostPart]] = {}
        for number, array in self._whole:
            for shard in array.addressable_shards:
                part = HostPart(number, box_from_index(shard.index, array.shape), shard.data)
                found.setdefault(shard.device, []).append(part)
        for device, part in self._apart:
            found.setdefault(device, []).append(part)
        self.is_waiting = True
        try:
            for parts in found.values():
                for part in parts:
                    part.data.block_until_ready()
        finally:
            self.is_waiting = False
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def wait_for_devices(self) -> float:
        """Wait until the first copy is there; the seconds that it took."""
        first = [array for _, array in self._whole[:1]] or [part.data for _, part in self._apart[:1]]
        self.is_waiting = True
        try:
            return device_wait_s(first)
        finally:
            self.is_waiting = False

    def close(self) -> None:
        """Let go of them."""
        self._whole = self._apart = ()


class HostTaker:
    """Of one tree: collects the leaves that hosts write, and shares them out.

    Args:
        setting: which leaves those are.
    """

    def __init__(self, setting: Colocated) -> None:
        self._setting = setting
        self._whole: list[tuple[int, jax.Array, jax.sharding.Sharding]] = []
        self._found: list[tuple[int, Box, jax.Array]] = []
        self._devices: list[jax.Device] = []
        self._shares = WriteAssignment(0, LEAST_CUT_BYTES)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], Sequence[HeldBox]] = {}
        self._beside: dict[jax.sharding.Sharding, jax.sharding.Sharding | None] = {}

    def takes(self, sharding: jax.sharding.Sharding) -> bool:
        """Whether arrays of this sharding are for it."""
        return runs_on_hosts(sharding, self._setting)

    def add(self, number: int, leaf: jax.Array) -> None:
        """Take one: every part of it once, of the device with the fewest bytes so far of those that hold it.

        Parts are cut out on their device, so that no more than them travels.
        """
        layout = self._layout(leaf.sharding, leaf.shape)
        if all(len(held.holders) == 1 for held in layout):
            beside = self._sharding_beside(leaf.sharding)
            if beside is not None:
                self._whole.append((number, leaf, beside))
                return
        here = {shard.device.id: shard for shard in leaf.addressable_shards}
        for holder, (held, box) in self._shares.of_all(layout, np.dtype(leaf.dtype).itemsize):
            data, whole = here[holder].data, layout[held].box
            self._found.append((number, box, data if box == whole else cut_out(data, slices_within(box, whole))))
            self._devices.append(cpu_device_of(here[holder].device))

    def taken(self) -> HostParts | None:
        """Order the copies of all that was added; None: nothing was.

        Whole arrays are copied as such: JAX takes as long for one as for one part.
        """
        if not (self._whole or self._found):
            return None
        places = {device: jax.sharding.SingleDeviceSharding(device) for device in set(self._devices)}
        copies = jax.device_put(
            [leaf for _, leaf, _ in self._whole] + [data for *_, data in self._found],
            [beside for *_, beside in self._whole] + [places[device] for device in self._devices],
            may_alias=False,
        )
        whole = [(number, copy) for (number, *_), copy in zip(self._whole, copies, strict=False)]
        apart = [
            (device, HostPart(number, box, copy))
            for device, (number, box, _), copy in zip(self._devices, self._found, copies[len(whole) :], strict=True)
        ]
        self._whole.clear()
        self._found.clear()
        return HostParts(whole, apart)

    def _sharding_beside(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
        """The same over the CPU devices beside its devices; None: two of these share one, or it has no mesh."""
        if sharding not in self._beside:
            self._beside[sharding] = None
            if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
                mesh = sharding.mesh
                beside = [cpu_device_of(device) for device in mesh.devices.flat]
                if len(set(beside)) == len(beside):
                    devices = np.array(beside).reshape(mesh.devices.shape)
                    there = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
                    self._beside[sharding] = jax.sharding.NamedSharding(there, sharding.spec)
        return self._beside[sharding]

    def _layout(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Sequence[HeldBox]:
        found = self._layouts.get((sharding, shape))
        if found is None:
            holders: dict[Box, set[int]] = {}
            devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in devices.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                holders.setdefault(box, set()).add(device.id)
            found = [HeldBox(box, tuple(sorted(ids))) for box, ids in holders.items()]
            self._layouts[sharding, shape] = found
        return found


def host_taker(leaves: Sequence[Any], setting: Colocated) -> HostTaker | None:
    """For the leaves of one tree; None: no hosts are asked about any.

    Some may be of another runtime of this process, such as on its own CPU.

    Raises:
        SettingsError: hosts were asked for in a job of several processes, or Colocated Python cannot be used here.
    """
    if setting is False or (setting == "auto" and not has_single_controller()):
        return None
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not _is_traced(leaf)}
    if not any(runs_on_hosts(sharding, setting) for sharding in shardings):
        return None
    refuse_without_pickler()  # now, and not in the background
    return HostTaker(setting)


def _is_traced(leaf: jax.Array) -> bool:
    return isinstance(leaf, jax.core.Tracer)


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
    """Write the arrays of one checkpointable that lie on other hosts there; the files are those of any save.

    Args:
        directory: the attempt; the folder `name` exists in it.
        name: of the checkpointable.
        arrays: all of it.
        parts: what the hosts write.
        own: what this process has written, with numbers of segments that follow `before`.
        before: the segments that the manifest has already.
        settings: how.
        progress: told when a host has got further.

    Raises:
        What a host met, of the same class, named by the host.
        CheckpointError: the controller's directory is not there on a host.
    """
    by_device = parts.by_device()
    progress(0)
    calls = [
        _call(directory, name, arrays, writer, held, settings, device)
        for writer, (device, held) in enumerate(by_device.items(), 1)
    ]
    del by_device
    indexes: list[PartIndex] = [PartIndex((), (), ())] * len(calls)

    def looked(moved: bool) -> None:
        if moved:
            progress(0)

    with contextlib.closing(call_hosts(calls, f"saving {name} to {directory}", looked)) as results:
        for number, answer, _ in results:
            assert answer.index is not None
            indexes[number] = answer.index
            progress(answer.done_bytes)
    return _joined(name, own, before, indexes)


def _call(
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
        settings_there(dataclasses.asdict(settings)),
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


def _joined(
    name: str,
    own: WrittenArrays,
    before: Sequence[SegmentRecord],
    indexes: Sequence[PartIndex],
) -> WrittenArrays:
    """All as one; that it is whole is checked."""
    bare = tuple(msgspec.structs.replace(array, chunks=()) for array in own.arrays)
    written = tuple(number for number, array in enumerate(own.arrays) if array.chunks)
    mine = PartIndex(tuple(before), written, tuple(own.arrays[number].chunks for number in written))
    mine = msgspec.structs.replace(mine, segments=(*before, *own.segments))
    everyone = [index_summary(ProcessIndex("", (index,))) for index in (mine, *indexes)]
    segments, (part,) = merge_indexes([PartRecord(name, "", bare, (), msgspec.Raw(b"null"))], everyone)
    return WrittenArrays(tuple(segments[len(before) :]), part.arrays)
