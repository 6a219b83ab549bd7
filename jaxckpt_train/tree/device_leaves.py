"""Takes arrays from their devices: copied where they are or brought to the host, in the order of the files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import box_from_index
from jaxckpt_train.store.layout import ChunkSource, alignment_class
from jaxckpt_train.tree.device_copies import copy_on_devices, have_room
from jaxckpt_train.tree.device_wait import device_wait_s, some_arrays
from jaxckpt_train.tree.host_copies import copy_all
from jaxckpt_train.tree.pinned_host import is_on_host, start_transfers
from jaxckpt_train.tree.transfers import Ahead, ArrayToCome, Transfers


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
