"""Compares a copy with what it was made of: by digests where they are of the same bytes, else by the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.looking.leaf_reads import Wanted, over_pieces, pieces_of
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.copying import CHUNK_BYTES
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.kept_chunks import same_digests
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord


def refuse_another_content(source: Opened, copy: Opened) -> None:
    """Make sure that a copy holds what its source does.

    Raises:
        CorruptCheckpointError: it does not.
        StorageError: one of them cannot be read.
    """
    mine, theirs = source.committed.manifest.parts, copy.committed.manifest.parts
    if [part.name for part in mine] != [part.name for part in theirs]:
        raise _differs(copy, "its checkpointables")
    to_read: list[Wanted] = []
    for one, other in zip(mine, theirs, strict=True):
        if (one.kind, bytes(one.detail)) != (other.kind, bytes(other.detail)):
            raise _differs(copy, f"the tree of {one.name!r}")
        if one.files != other.files:
            raise _differs(copy, f"the files of {one.name!r}")
        to_read += _unsure(source, one, copy, other)
    for wanted, pair in over_pieces((source, copy), to_read):
        if not _same_bytes(*pair):
            raise _differs(copy, f"leaf {wanted.name!r}")


def _same_bytes(first: np.ndarray, second: np.ndarray) -> bool:
    return np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8))


def _unsure(source: Opened, one: PartRecord, copy: Opened, other: PartRecord) -> Iterator[Wanted]:
    """What has to be read: where the digests are not of the same bytes."""
    for array, copied in zip(one.arrays, other.arrays, strict=True):
        name = f"{one.name}/{array.name}"
        if _form(array) != _form(copied):
            raise _differs(copy, f"leaf {name!r}")
        manifests = source.committed.manifest, copy.committed.manifest
        itemsize = DTYPES[array.dtype].itemsize
        same = same_digests(manifests[0], array, manifests[1], copied, itemsize, CHUNK_BYTES)
        if same is None:
            yield from pieces_of(name, (array, copied))
        elif not same:
            raise _differs(copy, f"leaf {name!r}")


def _form(array: ArrayRecord) -> ArrayRecord:
    return msgspec.structs.replace(array, chunks=())


def _differs(copy: Opened, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{copy.path}: {what} came out otherwise than in the source; is the memory sound?")
