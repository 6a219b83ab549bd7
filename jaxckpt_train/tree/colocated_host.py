"""What runs on a host of a single-controller runtime, called with arrays of a CPU device there: writing, reading.

JAX sends a function to the hosts by its name, so that they run their own copy of this module.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt_train.errors import CheckpointError, OtherProcessError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.boxes import box_shape
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.layout import ArraySource, ChunkSource, OwnChunkSource
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.machine import this_process
from jaxckpt_train.store.manifest import FORMAT, FORMAT_VERSION, Manifest
from jaxckpt_train.store.process_index import PartIndex
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes
from jaxckpt_train.store.replaced import is_still
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.writer import write_arrays
from jaxckpt_train.told_errors import encode_error
from jaxckpt_train.tree.caller_context import enable_x64
from jaxckpt_train.tree.colocated_messages import (
    Answer,
    ReadPlan,
    UnseenError,
    WritePlan,
    answer_array,
    decode_plan,
    wanted_bytes,
)
from jaxckpt_train.tree.conversion import converted

_BACKEND: Backend = LocalBackend()
_SHOWN = 2000


class _Moved:
    """How many bytes this process has written and read for its controller."""

    def __init__(self) -> None:
        self.bytes, self._lock = 0, threading.Lock()

    def __call__(self, done: int) -> None:
        with self._lock:
            self.bytes += done


_moved = _Moved()


def moved_here(there: jax.Array) -> tuple[jax.Array]:
    """How far all that this process does for its controller has got: another number when it got further."""
    return (jax.device_put(np.frombuffer(_moved.bytes.to_bytes(8, "little"), np.uint8), there.sharding),)


def write_here(plan: jax.Array, *arrays: jax.Array) -> tuple[jax.Array]:
    """Write what a `WritePlan` says of these arrays, all of the CPU device of the plan; returns an `Answer`."""
    message = np.asarray(plan)
    return (jax.device_put(_answer(message, lambda: _written(message, arrays)), plan.sharding),)


def read_here(plan: jax.Array, shapes: Sequence[tuple[tuple[int, ...], str]]) -> tuple[jax.Array, ...]:
    """Read what a `ReadPlan` says; returns an `Answer`, and the boxes in their order, on the CPU device of the plan.

    `shapes`: of all boxes, and their dtypes, which JAX wants back whatever happens.
    """
    message, boxes = np.asarray(plan), list[jax.Array]()
    answer = _answer(message, lambda: _read(message, plan.sharding, boxes))
    if len(boxes) != len(shapes):
        with enable_x64(True):
            boxes[:] = [jax.device_put(np.zeros(shape, DTYPES[dtype]), plan.sharding) for shape, dtype in shapes]
    return jax.device_put(answer, plan.sharding), *boxes


def _answer(message: np.ndarray, work: Callable[[], tuple[int, PartIndex | None]]) -> np.ndarray:
    room = wanted_bytes(message)
    here = this_process()
    try:
        done, index = work()
        return answer_array(Answer(here.host, here.pid, done, index), room)
    except UnseenError:
        return answer_array(Answer(here.host, here.pid, is_unseen=True), room)
    except Exception as error:  # noqa: BLE001  # a process's edge: told to the controller
        try:
            return answer_array(Answer(here.host, here.pid, error=encode_error(error, 0)), room)
        except CheckpointError:
            short = OtherProcessError(f"{type(error).__name__}: {str(error)[:_SHOWN]}...")
            return answer_array(Answer(here.host, here.pid, error=encode_error(short, 0)), room)


def _written(message: np.ndarray, arrays: Sequence[jax.Array]) -> tuple[int, PartIndex]:
    plan: WritePlan = decode_plan(message, WritePlan)
    chunks: list[list[ChunkSource]] = [[] for _ in plan.arrays]
    for which, box, array in zip(plan.which, plan.boxes, arrays, strict=True):
        chunks[which].append(OwnChunkSource(box, np.asarray(array)))  # a copy, which only this save has
    sources = [
        ArraySource(array.name, array.shape, DTYPES[array.dtype], tuple(own))
        for array, own in zip(plan.arrays, chunks, strict=True)
    ]
    directory = os.fsdecode(plan.directory)
    settings = StoreSettings(**plan.settings)
    try:
        written = write_arrays(
            _BACKEND, directory, plan.part, sources, settings, first_segment=0, progress=_moved, process=plan.writer
        )
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CheckpointError(
            f"{directory}: the controller has made this directory, but it is not there on this host: the controller "
            "and all hosts save to one directory, on storage that all of them share"
        ) from error
    numbers = tuple(array.number for array in plan.arrays)
    return written.data_bytes, PartIndex(written.segments, numbers, tuple(each.chunks for each in written.arrays))


def _read(message: np.ndarray, sharding: jax.sharding.Sharding, boxes: list[jax.Array]) -> tuple[int, None]:
    plan: ReadPlan = decode_plan(message, ReadPlan)
    directory, settings = os.fsdecode(plan.directory), StoreSettings(**plan.settings)
    manifest = Manifest(FORMAT, FORMAT_VERSION, plan.digest, plan.block_bytes, plan.segments, (), {})
    committed = Committed(directory, manifest, plan.manifest_sha256)
    if not is_still(_BACKEND, committed):
        raise UnseenError(directory)
    wanted = [Wanted(each.record, each.boxes, each.dtype != each.record.dtype) for each in plan.arrays]
    firsts = [0, *itertools.accumulate(len(each.boxes) for each in plan.arrays)]
    found: list[Any] = [None] * firsts[-1]
    done = 0
    with (
        enable_x64(True),  # else the load was refused before
        contextlib.closing(iter_boxes(_BACKEND, committed, wanted, settings, _moved)) as reading,
    ):
        for number, box, data in reading:
            each = plan.arrays[number]
            if data.dtype != DTYPES[each.dtype]:
                data = converted(each.record.name, data, DTYPES[each.dtype])
            assert data.shape == box_shape(each.boxes[box])
            found[firsts[number] + box] = jax.device_put(data, sharding)
            done += data.nbytes
            del data  # on the CPU it is the array's memory now
    boxes[:] = found
    return done, None
