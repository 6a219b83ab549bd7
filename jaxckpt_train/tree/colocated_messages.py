"""What the controller and the hosts tell each other: plans and answers, as bytes in arrays of a size that returns."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.digests import HEX_DIGITS
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, SegmentRecord, block_count
from jaxckpt_train.store.process_index import PartIndex
from jaxckpt_train.store.segment import MAX_HEADER_BYTES, header_share_bytes

VERSION = 1
"""Of all that is told here. A host whose package tells otherwise refuses."""
_HEAD = struct.Struct("<QQQ")  # version, bytes that follow, bytes that the answer may have: never anything else
_LEAST_BYTES = 16 << 10  # room for the text of an error


class WrittenArray(msgspec.Struct, array_like=True, frozen=True):
    """An array of which a host writes something: its number in the checkpointable, and what it is."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class WritePlan(msgspec.Struct, array_like=True, frozen=True):
    """What one host writes: of `arrays[which[i]]` the box `boxes[i]`, which it is given as its i-th array.

    `writer` is the number that its files are named by; `directory` is that of the attempt.
    """

    directory: bytes
    part: str
    writer: int
    settings: dict[str, Any]
    arrays: tuple[WrittenArray, ...]
    which: tuple[int, ...]
    boxes: tuple[Box, ...]


class ReadArray(msgspec.Struct, array_like=True, frozen=True):
    """Boxes of an array that one host reads, and the dtype that they are to have."""

    record: ArrayRecord
    boxes: tuple[Box, ...]
    dtype: str


class ReadPlan(msgspec.Struct, array_like=True, frozen=True):
    """What one host reads of a checkpoint."""

    directory: bytes
    manifest_sha256: str
    digest: str
    block_bytes: int
    settings: dict[str, Any]
    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ReadArray, ...]


class UnseenError(CheckpointError):
    """What the controller has opened is not there on a host."""


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What a host has done, and how many bytes (`done_bytes`) that was; or the error that it met.

    `is_unseen`: what it was to read is not there on this host.
    """

    host: str
    pid: int
    done_bytes: int = 0
    index: PartIndex | None = None
    error: bytes | None = None
    is_unseen: bool = False


def plan_array(plan: WritePlan | ReadPlan, answer_bytes: int) -> np.ndarray:
    """A plan as the host is given it. Its size is a power of two, so that JAX knows it again at the next save."""
    return _framed(msgspec.msgpack.encode(plan), answer_bytes, _room(0))


def decode_plan(array: np.ndarray, kind: type[Any]) -> Any:
    """The plan.

    Raises:
        CheckpointError: it is of another version of this package.
    """
    version, length, _ = _HEAD.unpack_from(array.data)
    if version != VERSION:
        raise CheckpointError(
            f"told in version {version}, but the jaxckpt_train there knows version {VERSION}; install the same release "
            "of it on all hosts and on the controller"
        )
    return msgspec.msgpack.decode(array[_HEAD.size : _HEAD.size + length].data, type=kind)


def wanted_bytes(array: np.ndarray) -> int:
    """How many bytes the answer to a plan of any version has."""
    room: int = _HEAD.unpack_from(array.data)[2]
    return room


def answer_array(answer: Answer, room: int) -> np.ndarray:
    """An answer as the controller gets it.

    Raises:
        CheckpointError: it takes more than `room` bytes.
    """
    data = msgspec.msgpack.encode(answer)
    if len(data) + _HEAD.size > room:
        raise CheckpointError(f"an answer of {len(data):,} bytes, but only {room - _HEAD.size:,} were expected")
    return _framed(data, 0, room)


def decode_answer(array: np.ndarray) -> Answer:
    """The answer."""
    _, length, _ = _HEAD.unpack_from(array.data)
    return msgspec.msgpack.decode(array[_HEAD.size : _HEAD.size + length].data, type=Answer)


def room_for_index(plan: WritePlan, nbytes: Sequence[int]) -> int:
    """At least as many bytes as the answer to a plan takes; `nbytes`: of each of its boxes."""
    width = HEX_DIGITS[plan.settings["digest"]]
    digests = sum(block_count(size, BLOCK_BYTES) for size in nbytes) * width
    chunks = sum(64 + 20 * len(box) for box in plan.boxes) + 20 * len(plan.arrays)
    heads = sum(
        header_share_bytes(plan.arrays[number].name, 3 * len(box) + 1)
        for number, box in zip(plan.which, plan.boxes, strict=True)
    )
    files = 3 + 2 * sum(nbytes) // plan.settings["segment_bytes"] + heads // (MAX_HEADER_BYTES // 4)
    return _room(digests + chunks + files * (len(plan.part) + 256))


def settings_there(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a host takes them, which looks for no further hosts."""
    return {**settings, "colocated": False}


def error_room() -> int:
    """How many bytes an answer has that tells of nothing but an error."""
    return _room(0)


def _room(size: int) -> int:
    return 1 << (max(size + _HEAD.size, _LEAST_BYTES) - 1).bit_length()


def _framed(data: bytes, wanted: int, least: int) -> np.ndarray:
    array = np.zeros(max(_room(len(data)), least), np.uint8)
    _HEAD.pack_into(array.data, 0, VERSION, len(data), wanted)
    array[_HEAD.size : _HEAD.size + len(data)] = np.frombuffer(data, np.uint8)
    return array
