"""Tries an object store: what the credentials permit, its latency and throughput, and its clock. Takes seconds.

The time limits are short, and the measured rate limits the bytes that are sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import statistics
import time
from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StorageError
from jaxckpt_train.settings import KIB, MIB, ObjectStoreSettings, StoreSettings
from jaxckpt_train.store.backends.base import GONE, TEMPORARY_PREFIXES, Backend, objects_of
from jaxckpt_train.store.backends.by_path import backend_for
from jaxckpt_train.store.files import read_whole

SMALL_BYTES = KIB
FIRST_BYTES = 256 * KIB  # to find the rate
SMALL_OBJECTS = 5
TRIAL_S = 3.0  # for the larger object, in each direction
BLOCK_BYTES = 8 * MIB
P = ParamSpec("P")
SETTINGS = StoreSettings(
    object_store=ObjectStoreSettings(connect_timeout_s=5, request_timeout_s=10, retries=1, retry_timeout_s=10)
)


@dataclasses.dataclass(frozen=True)
class ObjectTrial:
    """What was found of an object store; None: it could not be measured.

    Attributes:
        operations: why each operation does not work, or None.
        put_s, get_s: the median time of a put and of a get of 1 KiB.
        bytes: the size of the object that was written and read at these rates.
        clock_s: by how much the clock of the storage is ahead of this machine; it shows full seconds.
    """

    operations: dict[str, str | None]
    put_s: float | None = None
    get_s: float | None = None
    bytes: int = 0
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    clock_s: float | None = None


def backend_for_trials() -> Backend:
    """A backend that does not wait long for an endpoint."""
    return backend_for(SETTINGS)


def try_objects(backend: Backend, directory: str, most_bytes: int) -> ObjectTrial:
    """Try each operation that a run needs with objects that are removed again, and measure, unless `most_bytes` is 0.

    After an operation that does not work, those that need it are not tried.
    """
    folder = f"{directory}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    trial = ObjectTrial({"list": _problem(lambda: _list(backend, directory))})
    operations = trial.operations
    operations["put"] = _problem(lambda: _put(backend, f"{folder}/first", b"first"))
    if operations["put"] is not None:
        return trial
    try:
        operations["get"] = _problem(lambda: _get(backend, folder, "first", b"first"))
        operations["conditional puts"] = _problem(lambda: _conditional(backend, folder))
        if operations["get"] is None and most_bytes:
            trial = _measured(backend, folder, most_bytes, trial)
    finally:
        operations["delete"] = _problem(lambda: _delete(backend, folder))
    return trial


def _problem(trial: Callable[[], None]) -> str | None:
    try:
        trial()
    except CheckpointError as error:
        return str(error)
    return None


def _list(backend: Backend, directory: str) -> None:
    try:
        backend.list(directory)
    except StorageError as error:
        if error.errno not in GONE:
            raise


def _put(backend: Backend, path: str, data: bytes) -> None:
    sink = backend.create(path, direct=False)
    try:
        for at in range(0, len(data), BLOCK_BYTES):
            sink.write_at(at, np.frombuffer(data, np.uint8)[at : at + BLOCK_BYTES])
        sink.finish(len(data), sync=True)
    finally:
        sink.abandon()


def _get(backend: Backend, folder: str, name: str, data: bytes) -> None:
    if read_whole(backend, folder, name, None).tobytes() != data:
        raise CorruptCheckpointError(f"{folder}/{name}: the storage returned other bytes than were just written to it")


def _conditional(backend: Backend, folder: str) -> None:
    objects_of(backend).probe(folder)
    record = f"{folder}/record"
    version = backend.swap_record(record, b"one", None)
    if version is None or backend.swap_record(record, b"two", None) is not None:
        raise StorageError(f"{record}: a record can be created twice, or not at all")


def _delete(backend: Backend, folder: str) -> None:
    backend.remove(folder)
    with contextlib.suppress(StorageError):
        if names := [entry.name for entry in backend.list(folder)]:
            raise CorruptCheckpointError(f"{folder}: {', '.join(names)} are still listed after they were removed")


def _measured(backend: Backend, folder: str, most_bytes: int, trial: ObjectTrial) -> ObjectTrial:
    """The trial with measurements, as far as they succeed; the reason of a failure is an operation of its own."""
    try:
        small = secrets.token_bytes(SMALL_BYTES)
        names = [f"small-{number}" for number in range(SMALL_OBJECTS)]
        put_s = statistics.median(_seconds(_put, backend, f"{folder}/{name}", small) for name in names)
        get_s = statistics.median(_seconds(_get, backend, folder, name, small) for name in names)
        trial = dataclasses.replace(trial, put_s=put_s, get_s=get_s, clock_s=_clock_s(backend, folder))
        size = FIRST_BYTES
        while True:
            data, name = secrets.token_bytes(size), f"large-{size}"
            write_s = _seconds(_put, backend, f"{folder}/{name}", data)
            read_s = _seconds(_get, backend, folder, name, data)
            trial = dataclasses.replace(
                trial, bytes=size, write_bytes_per_s=size / write_s, read_bytes_per_s=size / read_s
            )
            larger = min(most_bytes, int(size * TRIAL_S / max(write_s, read_s)))
            if larger < 2 * size:
                return trial
            size = min(larger, 16 * size)
    except CheckpointError as error:
        trial.operations["larger objects"] = str(error)
        return trial


def _seconds(work: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> float:
    start_s = time.perf_counter()
    work(*arguments, **named)
    return time.perf_counter() - start_s


def _clock_s(backend: Backend, folder: str) -> float:
    """By how much the clock of the storage is ahead, from an object that was written between two looks at ours."""
    before_s = time.time()
    _put(backend, f"{folder}/clock", b"clock")
    after_s = time.time()
    source = backend.open(folder, "clock", direct=False)
    source.close()
    theirs_s = source.modified_ns / 1e9
    if before_s - 1 <= theirs_s <= after_s + 1:  # it shows full seconds
        return 0.0
    return theirs_s - (before_s + after_s) / 2
