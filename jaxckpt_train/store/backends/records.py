"""Small mutable records on file systems, which have no compare-and-swap.

A record is a directory, and each version of it is a file that is named by its number. A name can be created only once,
so only one of several writers that have seen the same version creates the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable
from typing import Protocol

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import (
    GONE,
    TEMPORARY_PREFIXES,
    Files,
    Publishing,
    StoredRecord,
    sync_directory,
)

MAX_RECORD_BYTES = 64 << 20
_NAME = re.compile(r"([0-9]{10})\.json")
_TRIES = 10


class FileSystem(Files, Publishing, Protocol):
    """The operations on which versioned files are built."""


def read_newest_version(files: Files, path: str) -> StoredRecord | None:
    """Implements `Records.read_record` on a file system."""
    found = None
    for _ in range(_TRIES):
        numbers = _versions(files, path)
        if not numbers:
            return None
        try:
            return StoredRecord(numbers[-1], _read(files, path, _name(numbers[-1])))
        except (StorageError, CorruptCheckpointError) as error:
            found = StoredRecord(numbers[-1], b"", str(error))
            if getattr(error, "errno", None) not in GONE:
                break  # else a writer has replaced this version meanwhile
    return found


def add_next_version(files: FileSystem, path: str, data: bytes, version: int | None) -> int | None:
    """Implements `Records.swap_record` on a file system."""
    number = (version or 0) + 1
    target, draft = f"{path}/{_name(number)}", f"{path}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    if version is None:
        files.make_directory(path, parents=True, sync=True)
        sync_directory(files, os.path.dirname(path))  # an earlier writer may have created it without a sync
    try:
        _write(files, draft, data)
        files.rename(draft, target)
    except BaseException as error:
        with contextlib.suppress(StorageError):
            files.remove(draft)
        if isinstance(error, StorageError) and error.errno in {errno.EEXIST, *GONE}:
            return None  # another writer was faster, and may have removed the draft
        raise
    sync_directory(files, path)
    names = [entry.name for entry in files.list(path)]
    if max(_numbers(names)) > number:  # replaced already; or it came so late that the number was free again
        files.remove(target)
        return None
    with contextlib.suppress(StorageError):  # the next writer tries again
        for name in names:
            if name < _name(number):  # older versions, and drafts of dead writers
                files.remove(f"{path}/{name}")
    return number


def _write(files: Files, path: str, data: bytes) -> None:
    import numpy as np  # not needed by `jaxckpt --help`, which imports this module

    sink = files.create(path, direct=False)
    try:
        sink.write_at(0, np.frombuffer(data, np.uint8))
        sink.finish(len(data), sync=True)
    except BaseException:
        sink.abandon()
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


def _read(files: Files, path: str, name: str) -> bytes:
    from jaxckpt_train.store.files import read_whole  # imports numpy; see `_write`

    return read_whole(files, path, name, MAX_RECORD_BYTES).tobytes()
