"""Has the hosts of a single-controller runtime read what their devices need, and makes arrays of it where it lies."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, intersect
from jaxckpt_train.store.dtypes import DTYPES, dtype_name
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.replaced import refuse_another
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.colocated_calls import HostCall, HostResult, Kind, call_hosts
from jaxckpt_train.tree.colocated_devices import cpu_beside
from jaxckpt_train.tree.colocated_messages import (
    ReadArray,
    ReadPlan,
    UnseenError,
    error_room,
    plan_array,
    settings_there,
)
from jaxckpt_train.tree.placement import Placement


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

    def load(self, progress: Progress | None) -> list[jax.Array]:
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
            refuse_another(self._files, self._committed, may_be_gone=False)
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
            cpu, size = cpu_beside(read.device), self._bytes(read)
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
