"""Manifests of many chunks: the bulk checks accept exactly what a check of each chunk accepts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import manifest
from jaxckpt_train.store.manifest import (
    MANY,
    ArrayRecord,
    ChunkRecord,
    SegmentRecord,
    SegmentRoom,
    decode_manifest,
    encode_manifest,
)
from tests.support.checkpoints import commit
from tests.support.memory_backend import MemoryBackend

ROWS = 3 * MANY


def good() -> Any:
    """Return the manifest of an array of many chunks in several segments, as plain data."""
    arrays = {"w": np.arange(ROWS * 20000.0).reshape(ROWS, 20000), "small": np.zeros(3)}
    boxes = {"w": [((row, row + 1), (0, 20000)) for row in range(ROWS)]}
    settings = StoreSettings(segment_bytes=1 << 20, io_threads=1)
    content: Any = msgspec.json.decode(
        encode_manifest(commit(MemoryBackend(), "/a", arrays, settings, boxes=boxes).manifest)
    )
    assert len(content["segments"]) > 3
    return content


GOOD = msgspec.json.encode(good())


def test_valid_chunks_are_checked_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode_manifest(GOOD, "m")
    monkeypatch.setattr(manifest, "check_tiling", None)
    assert decode_manifest(GOOD, "m") == expected


BOX, SEGMENT, OFFSET, LENGTH, DIGESTS = range(5)
HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (LENGTH, 159999, "has 159999 bytes, expected 160000"),
        (LENGTH, 0, "has 0 bytes, expected"),
        (LENGTH, -160000, "has -160000 bytes, expected"),
        (LENGTH, 1 << 70, "not valid|bytes, expected"),
        (SEGMENT, -1, "segment number -1 does not exist"),
        (SEGMENT, 99, "segment number 99 does not exist"),
        (SEGMENT, HUGE, "segment number .* does not exist"),
        (SEGMENT, 1 << 64, "does not exist|not valid"),
        (OFFSET, 0, "outside"),
        (OFFSET, -4096, "outside"),
        (OFFSET, HUGE, "outside"),
        (OFFSET, HUGE - 2400, "outside"),
        (OFFSET, 1 << 66, "outside|not valid"),
        (OFFSET, 4096 + 8, "do not fill the segments"),
        (DIGESTS, "", "has 0 digest digits"),
        (DIGESTS, "0" * 64, "has 64 digest digits"),
        (BOX, [[0, 2], [0, 20000]], "overlap"),
        (BOX, [[0, 1 << 64], [0, 20000]], "outside shape|not valid"),
        (BOX, [[7, 8]], "outside shape"),
        (BOX, [], "outside shape"),
    ],
)
def test_one_wrong_number_among_many_is_named(place: int, value: object, message: str) -> None:
    content = msgspec.json.decode(GOOD)
    content["parts"][0]["arrays"][0]["chunks"][ROWS // 2][place] = value
    with pytest.raises(CorruptCheckpointError, match=f"^m: .*({message})"):
        decode_manifest(msgspec.json.encode(content), "m")


@pytest.mark.parametrize(("place", "more"), [(1, 8), (1, -8), (2, 8), (2, -8)])
def test_a_segment_that_is_not_filled_is_refused(place: int, more: int) -> None:
    content = msgspec.json.decode(GOOD)
    content["segments"][1][place] += more
    with pytest.raises(CorruptCheckpointError, match=r"outside|do not fill the segments"):
        decode_manifest(msgspec.json.encode(content), "m")


def test_a_segment_too_many_is_refused() -> None:
    content = msgspec.json.decode(GOOD)
    first = content["segments"][0]
    content["segments"].append([first[0].replace("s000", "s999"), 8192, 8192, first[3]])
    with pytest.raises(CorruptCheckpointError, match="do not fill the segments"):
        decode_manifest(msgspec.json.encode(content), "m")


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[SegmentRecord], list[ChunkRecord]]:
    """Chunks that fill segments, in any order."""
    segments, chunks = [], []
    for number in range(draw(st.integers(1, 4))):
        head = end = draw(st.integers(1, 50))
        for length in draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)):
            chunks.append(ChunkRecord((), number, end, length, ""))
            end += length
        segments.append(SegmentRecord(f"s{number}", end, head, ""))
    return segments, draw(st.permutations(chunks))


def fills(segments: list[SegmentRecord], chunks: list[ChunkRecord]) -> bool:
    """Return whether each byte of the data is in exactly one chunk, counted byte by byte."""
    for number, segment in enumerate(segments):
        found = [byte for c in chunks if c.segment == number for byte in range(c.offset, c.offset + c.length)]
        if sorted(found) != list(range(segment.header_bytes, segment.bytes)) or not found:
            return False
    return True


@given(placed(), st.data())
def test_full_segments_hold_each_byte_once(
    case: tuple[list[SegmentRecord], list[ChunkRecord]], data: st.DataObject
) -> None:
    segments, chunks = case
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(chunks) - 1))
        field = data.draw(st.sampled_from(["offset", "length", "lost", "twice"]))
        if field == "lost" and len(chunks) > 1:
            del chunks[at]
        elif field == "twice":
            chunks.append(chunks[at])
        elif field != "lost":
            old = getattr(chunks[at], field)
            chunks[at] = msgspec.structs.replace(chunks[at], **{field: max(1, old + data.draw(st.integers(-3, 3)))})
    half = len(chunks) // 2
    arrays = [ArrayRecord("x", (), "int8", tuple(some)) for some in (chunks[:half], chunks[half:])]
    assert SegmentRoom(segments, 32, 4096).are_full(arrays) == fills(segments, chunks)
