"""Read plain files with limits on their size."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import GONE, MISSING, Files, Opener, Replicated, Sink, Source, is_damage
from jaxckpt_train.store.manifest import BLOCK_BYTES, FileRecord, HexDigest, block_digests, digest_function
from jaxckpt_train.store.process_identity import memory_bytes
from jaxckpt_train.store.timeouts import time_limited


@time_limited
def is_file(files: Files, path: str) -> bool:
    """Whether there is a regular file at this path, or an object."""
    with contextlib.suppress(StorageError):
        return files.kind(path) == "file"
    return False


def file_exists(files: Files, path: str) -> bool:
    """Whether anything exists at this path; a storage that refuses to say counts as no."""
    try:
        return files.kind(path) is not None
    except StorageError:
        return False


SNIFFED_BYTES = 1024  # a Git LFS pointer is never longer
_SIGNATURES = (
    (b"version https://git-lfs", "a Git LFS pointer; run git lfs pull to download the file"),
    (b"<!doctype html", "a web page that the download saved instead of the file"),
    (b"<html", "a web page that the download saved instead of the file"),
    (b"<?xml", "an XML response of a server that the download saved instead of the file"),
    (b"pk\x03\x04", "a zip archive, such as torch.save writes"),
)


def other_content(data: bytes | bytearray) -> str:
    """Guess the kind of a file with unexpected content from its first bytes; empty if it is unknown."""
    begins = bytes(data).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return next((text for signature, text in _SIGNATURES if begins.startswith(signature)), "")


def _instead(files: Opener, directory: str, name: str, size: int) -> str:
    """The end of a message about a file of unexpected size: what it is instead, if that is known."""
    other = other_content(read_head(files, directory, name, SNIFFED_BYTES)) if size <= SNIFFED_BYTES else ""
    return f"; it is {other}" if other else ""


def file_record(
    files: Opener, directory: str, name: str, digest_name: str, progress: Callable[[int], None]
) -> FileRecord:
    """The manifest record of an existing file of any size. `progress` is called with the size of each block."""
    with contextlib.closing(files.open(directory, name, direct=False)) as source:
        return FileRecord(name, source.size, _digests_of(source, digest_name, BLOCK_BYTES, progress))


def copy_file(
    source: Source,
    sink: Sink,
    digest_name: str,
    progress: Callable[[int], None],
    *,
    block_bytes: int = BLOCK_BYTES,
    sync: bool = False,
    expected: str | None = None,
) -> str:
    """Copy a file of any size, and return the digests of its blocks. `progress` is called with the size of each.

    A block that is not as `expected`, by the digests, is read from another copy of the file, if there is an intact one.
    """
    try:
        digests = _digests_of(source, digest_name, block_bytes, progress, sink, expected)
        sink.finish(source.size, sync=sync)
    finally:
        sink.abandon()
    return digests


def _digests_of(
    source: Source,
    digest_name: str,
    block_bytes: int,
    progress: Callable[[int], None],
    copy: Sink | None = None,
    expected: str | None = None,
) -> str:
    digest, digests = digest_function(digest_name), list[str]()
    memory = np.empty(min(source.size, block_bytes), np.uint8)
    for at in range(0, source.size, block_bytes):
        block = memory[: min(block_bytes, source.size - at)]
        source.read_into(at, block, len(block))
        found = digest(memoryview(block))
        if expected is not None:
            wanted = expected[len(digests) * len(found) :][: len(found)]
            is_intact = functools.partial(has_digest, digest, block, wanted)
            found = wanted if found != wanted and read_intact(source, at, block, is_intact) else found
        digests.append(found)
        if copy is not None:
            copy.write_at(at, block)
        progress(len(block))
    return "".join(digests)


def read_whole(files: Opener, directory: str, name: str, limit: int | None) -> np.ndarray:
    """All bytes of a file below a directory, as a flat uint8 array.

    Raises CorruptCheckpointError: it is larger than `limit` bytes (None: no limit); StorageError.
    """
    with contextlib.closing(files.open(directory, name, direct=False)) as source:
        return read_opened(source, f"{directory}/{name}", limit)


def read_opened(source: Source, path: str, limit: int | None) -> np.ndarray:
    """All bytes of an open file. Raises as `read_whole`."""
    if limit is not None and source.size > limit:
        raise CorruptCheckpointError(f"{path}: {source.size} bytes, expected at most {limit}")
    return _read_span(source, 0, source.size, path)


def _read_span(source: Source, start: int, stop: int, path: str) -> np.ndarray:
    """Read a part of untrusted size. The system may promise more memory than it has, so check that first."""
    try:
        if stop - start > memory_bytes():
            raise MemoryError
        data = np.empty(stop - start, np.uint8)
    except MemoryError as error:
        message = f"{stop - start} bytes do not fit into memory: this machine has {memory_bytes()} bytes"
        raise StorageError(errno.ENOMEM, message, path) from error
    source.read_into(start, data, len(data))
    return data


def read_blocks(files: Opener, directory: str, name: str, limit: int, block_bytes: int) -> Iterator[bytes]:
    """The content of a file that may grow meanwhile, block by block. Raises as `read_whole`."""
    path = f"{directory}/{name}"
    with contextlib.closing(files.open(directory, name, direct=False)) as source:
        if source.size > limit:
            raise CorruptCheckpointError(f"{path}: {source.size} bytes, expected at most {limit}")
        for at in range(0, source.size, block_bytes):
            yield _read_span(source, at, min(at + block_bytes, source.size), path).tobytes()


def read_end(files: Opener, directory: str, name: str, limit: int) -> bytes:
    """The last bytes of a file that only grows, at most `limit`."""
    with contextlib.closing(files.open(directory, name, direct=False)) as source:
        whole = source.size
        return _read_span(source, max(0, whole - limit), whole, f"{directory}/{name}").tobytes()


def read_or_none(
    files: Opener, directory: str, name: str, limit: int, *, size: int | None = None
) -> bytes | bytearray | None:
    """All bytes of a small file of a checkpoint, of at most `limit` bytes; None if it does not exist.

    `size` is the size according to COMMIT, if that states it. Raises CorruptCheckpointError: it is not a file, or has
    another size, and is not read; StorageError: the storage refused for a reason that is not the checkpoint's fault.
    """
    path = f"{directory}/{name}"
    try:
        source: Source = files.open(directory, name, direct=False)
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            return None
        if error.errno in MISSING:
            raise CorruptCheckpointError(f"{path}: expected a regular file: {error}") from error
        raise
    with contextlib.closing(source):
        if source.size > limit:
            raise CorruptCheckpointError(f"{path}: {source.size} bytes, expected at most {limit}")
        if size is not None and source.size != size:
            instead = _instead(files, directory, name, source.size)
            raise CorruptCheckpointError(f"{path}: {source.size} bytes, but COMMIT says {size}{instead}")
        data = bytearray(source.size)
        source.read_into(0, np.frombuffer(data, np.uint8), len(data))
    return data


def read_head(files: Opener, directory: str, name: str, length: int) -> bytes:
    """The first bytes of a file, at most `length`; empty if there is no file."""
    try:
        source: Source = files.open(directory, name, direct=False)
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        return b""
    data = np.empty(min(source.size, length), np.uint8)
    with contextlib.closing(source):
        try:
            source.read_into(0, data, len(data))
        except CorruptCheckpointError:
            return b""  # it became shorter meanwhile
    return data.tobytes()


def open_recorded(
    files: Opener,
    directory: str,
    name: str,
    size: int,
    *,
    direct: bool | Literal["auto"] = False,
    subject: str = "file",
) -> Source:
    """Open a file that the manifest names.

    Raises CorruptCheckpointError: it is missing, no regular file, or has another size; StorageError: as `read_or_none`.
    """
    path = f"{directory}/{name}"
    try:
        source: Source = files.open(directory, name, direct=direct)
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        raise CorruptCheckpointError(f"{path}: the manifest names this {subject}, but: {error}") from error
    if source.size != size:
        source.close()
        instead = _instead(files, directory, name, source.size)
        raise CorruptCheckpointError(f"{path}: {source.size} bytes, but the manifest says {size}{instead}")
    return source


def has_digest(digest: HexDigest, data: np.ndarray, expected: str) -> bool:
    """Whether bytes have this digest."""
    return digest(memoryview(data)) == expected


def read_intact(source: Source, offset: int, data: np.ndarray, is_intact: Callable[[], bool]) -> bool:
    """Read bytes that are wrong from other copies of a file, if it has any, until they are intact; False: none is.

    Raises StorageError: none that can be read is intact, but one could not be read this time.
    """
    if not isinstance(source, Replicated):
        return False
    refused: StorageError | None = None
    for number in range(1, source.copies):
        try:
            source.read_copy(number, offset, data)
            if is_intact():
                return True
        except (StorageError, CorruptCheckpointError) as error:
            refused = error if isinstance(error, StorageError) and not is_damage(error) else refused
    if refused is not None:
        raise refused
    return False


def read_recorded(
    files: Opener, directory: str, record: FileRecord, digest_name: str | None, block_bytes: int
) -> np.ndarray:
    """All bytes of a file that the manifest names, verified with its digests unless `digest_name` is None."""
    path = f"{directory}/{record.file}"
    with contextlib.closing(open_recorded(files, directory, record.file, record.bytes)) as source:
        data = _read_span(source, 0, source.size, path)
        if digest_name is None:
            return data

        def is_intact() -> bool:
            return block_digests(data, block_bytes, digest_function(digest_name)) == record.digests

        if is_intact() or read_intact(source, 0, data, is_intact):
            return data
    raise CorruptCheckpointError(f"{path}: bytes 0 to {len(data)} are not what was saved ({digest_name} differs)")
