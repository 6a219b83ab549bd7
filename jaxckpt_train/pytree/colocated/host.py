"""The part that runs on the hosts of a single-controller runtime: it writes and reads what their devices hold.

The controller calls a function with arrays of a CPU device of the host. JAX sends functions by name, so that each host
runs its own copy of this module. Plans and answers are bytes in arrays of a few recurring sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np

from jaxckpt_train.distributed.rendezvous import encode_error
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, OtherProcessError, StorageError
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.pytree.placing import converted
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.by_path import backend_for
from jaxckpt_train.store.boxes import Box, box_shape
from jaxckpt_train.store.committed import Committed, is_unchanged
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    HEX_DIGITS,
    ArrayRecord,
    Manifest,
    SegmentRecord,
    block_count,
)
from jaxckpt_train.store.process_identity import this_process
from jaxckpt_train.store.process_index import PartIndex, part_index
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes, polling
from jaxckpt_train.store.segment import (
    DTYPES,
    MAX_HEADER_BYTES,
    ArraySource,
    ChunkSource,
    StableChunkSource,
    header_share_bytes,
)
from jaxckpt_train.store.writer import write_arrays

VERSION = 1
"""Version of the plans. A host with a package of another version refuses them."""
_HEAD = struct.Struct("<QQQ")  # version, number of bytes that follow, room for the answer: fixed for all versions
_LEAST_BYTES = 16 << 10  # room for the text of an error
_SHOWN = 2000
T = TypeVar("T")


class WrittenArray(msgspec.Struct, array_like=True, frozen=True):
    """An array of which a host writes a part."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class WritePlan(msgspec.Struct, array_like=True, frozen=True):
    """The data that one host writes: box `boxes[i]` of `arrays[which[i]]`, which it gets as its i-th array."""

    directory: bytes
    part: str
    writer: int
    settings: dict[str, Any]
    arrays: tuple[WrittenArray, ...]
    which: tuple[int, ...]
    boxes: tuple[Box, ...]


class ReadArray(msgspec.Struct, array_like=True, frozen=True):
    """Boxes of an array that one host reads, and the dtype that they must have."""

    record: ArrayRecord
    boxes: tuple[Box, ...]
    dtype: str


class ReadPlan(msgspec.Struct, array_like=True, frozen=True):
    """The data that one host reads of a checkpoint."""

    directory: bytes
    manifest_sha256: str
    digest: str
    block_bytes: int
    settings: dict[str, Any]
    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ReadArray, ...]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The result of a host's work with its number of bytes (`done_bytes`), or the error that it met."""

    host: str
    pid: int
    done_bytes: int = 0
    index: PartIndex | None = None
    error: bytes | None = None


def plan_array(plan: WritePlan | ReadPlan, answer_bytes: int) -> np.ndarray:
    """Encode a plan for a host. Its size is a power of two, so that the next save can use the same compiled call."""
    return _framed(msgspec.msgpack.encode(plan), answer_bytes, answer_room(0))


def decode_plan(array: np.ndarray, kind: type[T]) -> T:
    """Decode a plan; raise CheckpointError if another version of this package made it."""
    version, _, _ = _HEAD.unpack_from(array.data)
    if version != VERSION:
        raise CheckpointError(
            f"the plan has version {version}, but jaxckpt_train on this host expects version {VERSION}; install the "
            "same release on all hosts and on the controller"
        )
    return _unframed(array, kind)


def answer_array(answer: Answer, room: int) -> np.ndarray:
    """Encode an answer for the controller; raise CheckpointError if it takes more than `room` bytes."""
    data = msgspec.msgpack.encode(answer)
    if len(data) + _HEAD.size > room:
        raise CheckpointError(f"the answer has {len(data):,} bytes, expected at most {room - _HEAD.size:,}")
    return _framed(data, 0, room)


def decode_answer(array: np.ndarray) -> Answer:
    """Decode an answer."""
    return _unframed(array, Answer)


def _unframed(array: np.ndarray, kind: type[T]) -> T:
    _, length, _ = _HEAD.unpack_from(array.data)
    return msgspec.msgpack.decode(array[_HEAD.size : _HEAD.size + length].data, type=kind)


def room_for_index(plan: WritePlan, nbytes: Sequence[int]) -> int:
    """Return an upper bound of the size of the answer to a plan; `nbytes`: of each of its boxes."""
    width = HEX_DIGITS[plan.settings["digest"]]
    digests = sum(block_count(size, BLOCK_BYTES) for size in nbytes) * width
    chunks = sum(64 + 20 * len(box) for box in plan.boxes) + 20 * len(plan.arrays)
    heads = sum(
        header_share_bytes(plan.arrays[number].name, 3 * len(box) + 1)
        for number, box in zip(plan.which, plan.boxes, strict=True)
    )
    files = 3 + 2 * sum(nbytes) // plan.settings["segment_bytes"] + heads // (MAX_HEADER_BYTES // 4)
    return answer_room(digests + chunks + files * (len(plan.part) + 256))


def settings_there(settings: StoreSettings) -> dict[str, Any]:
    """Return the settings for a host, which must not delegate to further hosts."""
    return {**dataclasses.asdict(settings), "colocated": False}


def answer_room(size: int = 0) -> int:
    """Return the size of an answer with this number of bytes, or of one that reports only an error."""
    return 1 << (max(size + _HEAD.size, _LEAST_BYTES) - 1).bit_length()


def _framed(data: bytes, wanted: int, least: int) -> np.ndarray:
    array = np.zeros(max(answer_room(len(data)), least), np.uint8)
    _HEAD.pack_into(array.data, 0, VERSION, len(data), wanted)
    array[_HEAD.size : _HEAD.size + len(data)] = np.frombuffer(data, np.uint8)
    return array


_moves = 0


def _moved(done: int) -> None:
    global _moves
    _moves += 1  # two threads may count one: it is only a sign of progress


def moved_here(there: jax.Array) -> tuple[jax.Array]:
    """Return the progress of all work for the controller: a number that changes with progress."""
    return (jax.device_put(np.frombuffer(_moves.to_bytes(8, "little"), np.uint8), there.sharding),)


def write_here(plan: jax.Array, *arrays: jax.Array) -> tuple[jax.Array]:
    """Write these arrays as a `WritePlan` says, all on the CPU device of the plan; return an `Answer`."""
    message = np.asarray(plan)
    return (jax.device_put(_answer(message, lambda: _write(message, arrays)), plan.sharding),)


def read_here(plan: jax.Array, shapes: Sequence[tuple[tuple[int, ...], str]]) -> tuple[jax.Array, ...]:
    """Read as a `ReadPlan` says; return an `Answer`, and boxes of these shapes, as JAX expects even after an error."""
    message, boxes = np.asarray(plan), list[jax.Array]()
    answer = _answer(message, lambda: _read(message, plan.sharding, boxes))
    if len(boxes) != len(shapes):
        with enable_x64(True):
            boxes[:] = [jax.device_put(np.zeros(shape, DTYPES[dtype]), plan.sharding) for shape, dtype in shapes]
    return jax.device_put(answer, plan.sharding), *boxes


def _answer(message: np.ndarray, work: Callable[[], tuple[int, PartIndex | None]]) -> np.ndarray:
    here, (_, _, room) = this_process(), _HEAD.unpack_from(message.data)  # the room is the same in all versions
    try:
        done, index = work()
        return answer_array(Answer(here.host, here.pid, done, index), room)
    except Exception as error:  # noqa: BLE001  # end of a process: the error goes to the controller
        try:
            return answer_array(Answer(here.host, here.pid, error=encode_error(error, 0)), room)
        except CheckpointError:
            short = OtherProcessError(f"{type(error).__name__}: {str(error)[:_SHOWN]}...")
            return answer_array(Answer(here.host, here.pid, error=encode_error(short, 0)), room)


def _write(message: np.ndarray, arrays: Sequence[jax.Array]) -> tuple[int, PartIndex]:
    plan = decode_plan(message, WritePlan)
    chunks: list[list[ChunkSource]] = [[] for _ in plan.arrays]
    for which, box, array in zip(plan.which, plan.boxes, arrays, strict=True):
        chunks[which].append(StableChunkSource(box, np.asarray(array)))  # a copy that only this save uses
    sources = [
        ArraySource(array.name, array.shape, DTYPES[array.dtype], tuple(own))
        for array, own in zip(plan.arrays, chunks, strict=True)
    ]
    directory = os.fsdecode(plan.directory)
    settings = StoreSettings(**plan.settings)
    try:
        written = write_arrays(
            backend_for(settings),
            directory,
            plan.part,
            sources,
            settings,
            first_segment=0,
            progress=_moved,
            process=plan.writer,
        )
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CheckpointError(
            f"{directory}: the controller has created this directory, but it does not exist on this host; save to "
            "storage that the controller and all hosts share"
        ) from error
    found = {array.number: each.chunks for array, each in zip(plan.arrays, written.arrays, strict=True)}
    return written.data_bytes, part_index(written.segments, found)


def _read(message: np.ndarray, sharding: jax.sharding.Sharding, boxes: list[jax.Array]) -> tuple[int, None]:
    plan = decode_plan(message, ReadPlan)
    directory, settings = os.fsdecode(plan.directory), StoreSettings(**plan.settings)
    manifest = Manifest(FORMAT, FORMAT_VERSION, plan.digest, plan.block_bytes, plan.segments, (), {})
    committed, backend = Committed(directory, manifest, plan.manifest_sha256), backend_for(settings)
    if not is_unchanged(backend, committed):
        raise NotACheckpointError(
            f"{directory}: the controller has opened this checkpoint, but this host finds none, or another one; load "
            "it from storage that the controller and all hosts share"
        )
    wanted = [Wanted(each.record, each.boxes, each.dtype != each.record.dtype) for each in plan.arrays]
    firsts = [0, *itertools.accumulate(len(each.boxes) for each in plan.arrays)]
    found: list[Any] = [None] * firsts[-1]
    done = 0
    with (
        enable_x64(True),  # without x64, the controller has refused such a load before
        polling(_moved),  # a disk that does not answer is reported by this host, not by the controller
        contextlib.closing(iter_boxes(backend, committed, wanted, settings, _moved)) as reading,
    ):
        for number, box, data in reading:
            each = plan.arrays[number]
            if data.dtype != DTYPES[each.dtype]:
                data = converted(each.record.name, data, DTYPES[each.dtype])
            assert data.shape == box_shape(each.boxes[box])
            found[firsts[number] + box] = jax.device_put(data, sharding)
            done += data.nbytes
            del data  # on the CPU, it may be the array's memory now
    boxes[:] = found
    return done, None
