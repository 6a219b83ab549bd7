"""Has the hosts of a single-controller runtime write what they hold of a checkpointable, and joins what they wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.layout import ArraySource
from jaxckpt_train.store.manifest import PartRecord, SegmentRecord
from jaxckpt_train.store.process_index import PartIndex, ProcessIndex, merge_indexes, told_index
from jaxckpt_train.store.writer import Progress, WrittenArrays
from jaxckpt_train.tree.colocated_calls import HostCall, call_hosts
from jaxckpt_train.tree.colocated_messages import WritePlan, WrittenArray, plan_array, room_for_index, settings_there
from jaxckpt_train.tree.colocated_taking import HostPart, HostParts


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
    everyone = [told_index(ProcessIndex("", (index,))) for index in (mine, *indexes)]
    segments, (part,) = merge_indexes([PartRecord(name, "", bare, (), msgspec.Raw(b"null"))], everyone)
    return WrittenArrays(tuple(segments[len(before) :]), part.arrays)
