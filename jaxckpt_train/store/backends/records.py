"""Small mutable records on file systems, which have no compare-and-swap.

A record is a directory, and each version of it is a file that is named by its number. A name can be created only once,
so only one of several writers that have seen the same version creates the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import GONE, Backend, Files, Opener, StoredRecord, sync_directory

MAX_RECORD_BYTES = 64 << 20
_NAME = re.compile(r"([0-9]{10})\.json")
_TRIES = 10


def read_newest_version(files: Files, path: str) -> StoredRecord | None:
    """Implements `Records.read_record` on a file system."""
    found, number = None, 0
    for _ in range(_TRIES):
        numbers = _versions(files, path)
        if not numbers:
            return None
        number = max(number + 1, numbers[-1])  # a user-space file system may list an old version for a while
        try:
            return _read(files, path, number)
        except StorageError as error:
            found = StoredRecord(numbers[-1], b"", None, str(error))
            if error.errno not in GONE:
                break  # else a writer has replaced this version meanwhile
    return found


def add_next_version(files: Backend, path: str, data: bytes, version: int | None) -> int | None:
    """Implements `Records.swap_record` on a file system."""
    number = (version or 0) + 1
    target = f"{path}/{_name(number)}"
    if version is None:
        files.make_directory(path, parents=True, sync=False)
        sync_directory(files, os.path.dirname(path))  # always: an earlier writer may have died before its own sync
    try:
        if not files.write_new(target, data):
            return None
    except StorageError as error:
        if error.errno in GONE:
            return None  # another writer was faster, and has removed the draft
        raise
    sync_directory(files, path)
    names = [entry.name for entry in files.list(path)]
    if max(_numbers(names), default=number + 1) > number:  # replaced or removed; or so late that the number was free
        files.remove(target)
        return None
    with contextlib.suppress(StorageError):  # the next writer tries again
        for name in names:
            if name < _name(number):  # older versions, and drafts of dead writers
                files.remove(f"{path}/{name}")
    return number


def refresh_version(files: Backend, path: str, version: int) -> None:
    """Implements `Records.refresh_record` on a file system."""
    try:
        files.touch(f"{path}/{_name(version)}")
    except StorageError as error:
        if error.errno not in GONE:
            raise


def _versions(files: Files, path: str) -> list[int]:
    try:
        return _numbers(entry.name for entry in files.list(path))
    except StorageError as error:
        if error.errno in GONE:
            return []
        raise


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def _name(version: int) -> str:
    return f"{version:010d}.json"


def _read(files: Opener, path: str, version: int) -> StoredRecord:
    import numpy as np  # not needed by `jaxckpt --help`, which imports this module

    name = _name(version)
    with contextlib.closing(files.open(path, name, direct=False)) as source:
        if source.size > MAX_RECORD_BYTES:
            problem = f"{path}/{name}: {source.size} bytes, expected at most {MAX_RECORD_BYTES}"
            return StoredRecord(version, b"", source.modified_ns, problem)
        data = bytearray(source.size)
        try:
            source.read_into(0, np.frombuffer(data, np.uint8), len(data))
        except (StorageError, CorruptCheckpointError) as error:
            if getattr(error, "errno", None) in GONE:
                raise
            return StoredRecord(version, b"", source.modified_ns, str(error))
        return StoredRecord(version, bytes(data), source.modified_ns)
