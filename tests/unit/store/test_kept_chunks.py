"""Chunks that a copy keeps: large ones are cut at block boundaries, so that their digests stay valid."""

from __future__ import annotations

import msgspec
import pytest

from jaxckpt_train.store.boxes import Box, box_elements, check_tiling, full_box
from jaxckpt_train.store.copy import kept_boxes, same_digests
from jaxckpt_train.store.manifest import BLOCK_BYTES, FORMAT, FORMAT_VERSION, ArrayRecord, ChunkRecord, Manifest

MIB = 1 << 20


def array_of(shape: tuple[int, ...], *boxes: Box) -> ArrayRecord:
    chunks = [
        ChunkRecord(box, 0, 0, 4 * box_elements(box), digests_of(4 * box_elements(box)))
        for box in boxes or [full_box(shape)]
    ]
    return ArrayRecord("w", shape, "float32", tuple(chunks))


def digests_of(length: int) -> str:
    """Return one digest for each block; the digests differ."""
    return "".join(f"{number:x}".zfill(32) for number in range(-(-length // BLOCK_BYTES)))


def manifest_of(digest: str = "xxh3-128", block_bytes: int = BLOCK_BYTES) -> Manifest:
    return Manifest(FORMAT, FORMAT_VERSION, digest, block_bytes, (), (), {})


def copied(array: ArrayRecord, most_bytes: int) -> ArrayRecord:
    """Return the record of a copy, whose pieces have the digests of their position in the source."""
    chunks, at = [], 0
    whole = array.chunks[0].digests
    for box in kept_boxes(array, 4, most_bytes):
        length = 4 * box_elements(box)
        blocks = -(-length // BLOCK_BYTES)
        chunks.append(ChunkRecord(box, 0, 0, length, whole[32 * at : 32 * (at + blocks)]))
        at += blocks
    return msgspec.structs.replace(array, chunks=tuple(reversed(chunks)))  # the file has another order


@pytest.mark.parametrize("shape", [(3 << 20,), (3072, 1024), (1, 1536, 2048), (3, 1024, 1024), (12289, 257)])
@pytest.mark.parametrize("most_bytes", [4 * MIB, 5 * MIB, 9 * MIB])
def test_pieces_tile_array_and_none_is_too_large(shape: tuple[int, ...], most_bytes: int) -> None:
    boxes = kept_boxes(array_of(shape), 4, most_bytes)
    check_tiling(boxes, shape, "w")
    assert max(4 * box_elements(box) for box in boxes) <= most_bytes


@pytest.mark.parametrize("shape", [(3 << 20,), (3072, 1024), (1, 1536, 2048), (3, 1024, 1024)])
@pytest.mark.parametrize("most_bytes", [4 * MIB, 9 * MIB, 64 * MIB])
def test_pieces_of_whole_blocks_have_digests_of_source(shape: tuple[int, ...], most_bytes: int) -> None:
    array = array_of(shape)
    copy = copied(array, most_bytes)
    assert same_digests(manifest_of(), array, manifest_of(), copy, 4, most_bytes) is True
    last = copy.chunks[0]
    flipped = msgspec.structs.replace(last, digests="f" + last.digests[1:])
    wrong = msgspec.structs.replace(copy, chunks=(flipped, *copy.chunks[1:]))
    assert same_digests(manifest_of(), array, manifest_of(), wrong, 4, most_bytes) is False


def test_digests_of_other_blocks_are_not_compared() -> None:
    odd = array_of((12289, 257))  # no number of rows makes whole blocks
    assert same_digests(manifest_of(), odd, manifest_of(), copied(odd, 5 * MIB), 4, 5 * MIB) is None
    array = array_of((3072, 1024))
    copy = copied(array, 4 * MIB)
    assert same_digests(manifest_of(), array, manifest_of(), copy, 4, 9 * MIB) is None  # cut in other places
    assert same_digests(manifest_of(), array, manifest_of("sha256"), copy, 4, 4 * MIB) is None
    assert same_digests(manifest_of(block_bytes=MIB), array, manifest_of(), copy, 4, 4 * MIB) is None


def test_chunks_of_a_sharded_array_are_kept() -> None:
    boxes: list[Box] = [((0, 4), (0, 3)), ((0, 4), (3, 6)), ((4, 8), (0, 6))]
    array = array_of((8, 6), *boxes)
    assert kept_boxes(array, 4, 4 * MIB) == boxes
    assert same_digests(manifest_of(), array, manifest_of(), array, 4, 4 * MIB) is True
    assert kept_boxes(ArrayRecord("w", (0, 3), "float32", ()), 4, MIB) == []
