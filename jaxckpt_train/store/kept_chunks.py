"""The chunks of an array in a copy that keeps them: those of the source, the largest ones cut between two blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, Manifest


def kept_boxes(array: ArrayRecord, itemsize: int, most_bytes: int) -> list[Box]:
    """The boxes of the chunks of a copy, none of more than `most_bytes`."""
    return [box for chunk in array.chunks for box in _cut(chunk.box, itemsize, most_bytes)]


def _cut(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """A box in pieces that are whole blocks where that goes: the digests of the source are theirs then."""
    if not box or box_elements(box) * itemsize <= most_bytes:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    row = box_elements(inner) * itemsize
    rows = most_bytes // row
    if not rows:
        for at in range(start, stop):
            yield from (((at, at + 1), *rest) for rest in _cut(inner, itemsize, most_bytes))
        return
    whole = BLOCK_BYTES // math.gcd(BLOCK_BYTES, row)  # rows that make whole blocks
    rows = rows // whole * whole or rows
    yield from (((at, min(at + rows, stop)), *inner) for at in range(start, stop, rows))


def same_digests(
    source: Manifest, array: ArrayRecord, copy: Manifest, copied: ArrayRecord, itemsize: int, most_bytes: int
) -> bool | None:
    """Whether the digests of an array and of its copy are the same; None: they are not of the same bytes.

    Args:
        source, array: what was copied.
        copy, copied: what came of it.
        itemsize, most_bytes: as the boxes were made with.
    """
    if (source.digest, source.block_bytes) != (copy.digest, copy.block_bytes):
        return None
    by_box = {chunk.box: chunk for chunk in copied.chunks}
    for chunk in array.chunks:
        pieces = [by_box.get(box) for box in _cut(chunk.box, itemsize, most_bytes)]
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(pieces) or any(piece.length % copy.block_bytes for piece in found[:-1]):
            return None
        if "".join(piece.digests for piece in found) != chunk.digests:
            return False
    return True
