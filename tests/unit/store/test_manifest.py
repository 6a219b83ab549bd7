"""The manifest round-trips, and a field that contradicts another or the format is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import manifest
from jaxckpt_train.store.buffers import empty_array
from jaxckpt_train.store.manifest import (
    MAX_BLOCK_BYTES,
    MAX_INFO_BYTES,
    Manifest,
    decode_manifest,
    encode_manifest,
    is_plain_name,
)
from tests.support.checkpoints import commit
from tests.support.in_time import in_time
from tests.support.memory_backend import MemoryBackend
from tests.support.strategies import shapes, tilings

FILE_DIGEST = "0" * 32


def manifest_bytes() -> bytes:
    """Encode two arrays (one in two chunks), an empty array, and a plain file."""
    arrays = {
        "a": np.arange(12.0).reshape(4, 3),
        "b": np.zeros(5, np.uint8),
        "empty": np.zeros((0, 3)),
    }
    boxes = {"a": [((0, 2), (0, 3)), ((2, 4), (0, 3))]}
    committed = commit(MemoryBackend(), "/runs/a", arrays, StoreSettings(), boxes=boxes)
    content = json.loads(encode_manifest(committed.manifest))
    content["parts"].append(
        {"name": "data", "kind": "json", "arrays": [], "files": [["data/p00000.json", 5, FILE_DIGEST]], "detail": {}}
    )
    content["info"] = {"created": "today", "big": 1 << 70, "small": 1e-300, "text": "\u00e9\u0000"}
    return msgspec.json.encode(content)


GOOD = manifest_bytes()
Edit = Callable[[Any], None]


def edited(edit: Edit) -> bytes:
    content = json.loads(GOOD)
    edit(content)
    return msgspec.json.encode(content)


def put(*path: Any) -> Edit:
    """Return an edit that assigns the last item at the path given by the others."""

    def edit(content: Any) -> None:
        *way, last, value = path
        for step in way:
            content = content[step]
        content[last] = value

    return edit


ARRAY_A, ARRAY_B, EMPTY = (("parts", 0, "arrays", number) for number in range(3))
CHUNK = (*ARRAY_B, "chunks", 0)
SEGMENT = ("segments", 0)
FILE = ("parts", 1, "files", 0)

REFUSED: dict[str, tuple[Edit, str]] = {
    "another format": (put("format", "orbax"), "format is 'orbax', expected 'jaxckpt'"),
    "format is null": (put("format", None), "not valid"),
    "version 0": (put("format_version", 0), "version 0 does not exist"),
    "version is a bool": (put("format_version", True), "not valid: Expected `int`"),
    "version is a float": (put("format_version", 1.0), "not valid: Expected `int`"),
    "unknown digest": (put("digest", "md5"), "unknown digest 'md5'"),
    "other digest": (put("digest", "sha256"), "invalid header digest"),
    "blocks of nothing": (put("block_bytes", 0), "block_bytes is 0"),
    "tiny blocks": (put("block_bytes", 4095), "block_bytes is 4095"),
    "endless blocks": (put("block_bytes", 1 << 62), "block_bytes is"),
    "unknown field": (put("more", 1), "not valid: .*unknown field `more`"),
    "unknown field of a part": (put("parts", 0, "more", 1), "unknown field `more`"),
    "unknown field of an array": (put(*ARRAY_A, "more", 1), "unknown field `more`"),
    "chunk with more": (lambda c: c["parts"][0]["arrays"][1]["chunks"][0].append(1), "not valid"),
    "chunk with less": (lambda c: c["parts"][0]["arrays"][1]["chunks"][0].pop(), "not valid"),
    "info is a list": (put("info", []), "not valid"),
    "part twice": (lambda c: c["parts"].append(c["parts"][1]), "not plain or not unique"),
    "array twice": (put(*ARRAY_A, "name", "b"), "an array name appears twice"),
    "segment twice": (lambda c: c["segments"].append(c["segments"][0]), "a file appears twice"),
    "file is a segment": (put(*FILE, 0, "state/p00000-s000.safetensors"), "a file appears twice"),
    "wider dtype": (put(*ARRAY_A, "dtype", "complex128"), "has 48 bytes, expected"),
    "other shape": (put(*ARRAY_A, "shape", [4, 4]), "boxes cover 12 of 16"),
    "smaller shape": (put(*ARRAY_A, "shape", [3, 3]), "outside shape"),
    "fewer dimensions": (put(*ARRAY_A, "shape", [12]), "outside shape"),
    "negative shape": (put(*ARRAY_A, "shape", [-4, -3]), "impossible shape"),
    "65 dimensions": (put(*ARRAY_A, "shape", [1] * 65), "impossible shape"),
    "huge shape": (put(*ARRAY_A, "shape", [1 << 62]), "impossible shape"),
    "a shape that wraps around 64 bits": (put(*ARRAY_A, "shape", [1 << 32, 1 << 32]), "impossible shape"),
    "nothing, huge": (put(*EMPTY, "shape", [1 << 61, 0]), "impossible shape"),
    "nothing that wraps around 64 bits": (put(*EMPTY, "shape", [0, 1 << 61, 1 << 61]), "impossible shape"),
    "bool in the shape": (put(*ARRAY_A, "shape", [True, 3]), "not valid: Expected `int`"),
    "float in the shape": (put(*ARRAY_A, "shape", [4.0, 3]), "not valid: Expected `int`"),
    "chunks of nothing": (put(*ARRAY_B, "shape", [0]), "chunks of an array without elements"),
    "no chunks": (put(*ARRAY_B, "chunks", []), "boxes cover 0 of 5"),
    "chunk twice": (lambda c: c["parts"][0]["arrays"][1]["chunks"].extend(c["parts"][0]["arrays"][1]["chunks"]),
                    "overlap"),
    "overlapping boxes": (put(*ARRAY_A, "chunks", 1, 0, [[1, 3], [0, 3]]), "overlap"),
    "empty box": (put(*CHUNK, 0, [[3, 3]]), "is empty or outside"),
    "reversed box": (put(*CHUNK, 0, [[5, 0]]), "is empty or outside"),
    "box outside": (put(*CHUNK, 0, [[1, 6]]), "is empty or outside"),
    "negative box": (put(*CHUNK, 0, [[-1, 4]]), "is empty or outside"),
    "no such segment": (put(*CHUNK, 1, 1), "segment number 1 does not exist"),
    "negative segment": (put(*CHUNK, 1, -1), "segment number -1 does not exist"),
    "in the header": (put(*CHUNK, 2, 0), "outside 'state/p00000-s000.safetensors'"),
    "negative offset": (put(*CHUNK, 2, -5), "outside"),
    "beyond the segment": (put(*CHUNK, 2, 1 << 61), "outside"),
    "one byte further": (lambda c: shift(c, 1), "outside"),
    "one byte earlier": (lambda c: shift(c, -1), "do not fill the segments"),
    "other length": (put(*CHUNK, 3, 4), "has 4 bytes, expected"),
    "digest missing": (put(*CHUNK, 4, ""), "has 0 digest digits, expected"),
    "digest cut": (put(*CHUNK, 4, "0" * 31), "has 31 digest digits, expected"),
    "a digest too many": (put(*CHUNK, 4, "0" * 64), "has 64 digest digits, expected"),
    "segment longer than its chunks": (lambda c: grow(c, 1), "do not fill the segments"),
    "segment shorter than its chunks": (lambda c: grow(c, -1), "outside"),
    "segment of nothing": (put(*SEGMENT, 1, 0), "impossible sizes"),
    "segment of negative size": (put(*SEGMENT, 1, -1), "impossible sizes"),
    "endless segment": (put(*SEGMENT, 1, 1 << 62), "impossible sizes"),
    "no header": (put(*SEGMENT, 2, 0), "impossible sizes"),
    "short header": (put(*SEGMENT, 2, 4095), "do not fill the segments"),
    "header over the limit": (lambda c: c["segments"][0].__setitem__(slice(1, 3), [1 << 40, (64 << 20) + 9]),
                              "impossible sizes"),
    "digest of the header cut": (put(*SEGMENT, 3, "0"), "invalid header digest"),
    "file of negative size": (put(*FILE, 1, -1), "impossible size or digest"),
    "endless file": (put(*FILE, 1, 1 << 62), "impossible size or digest"),
    "file without digest": (put(*FILE, 2, ""), "impossible size or digest"),
    "file of another part": (put(*FILE, 0, "other/p00000.json"), "not a plain file of a checkpointable"),
}  # fmt: skip


def shift(content: Any, by: int) -> None:
    content["parts"][0]["arrays"][1]["chunks"][0][2] += by


def grow(content: Any, by: int) -> None:
    content["segments"][0][1] += by


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_contradicts_itself_is_refused(name: str) -> None:
    edit, message = REFUSED[name]
    assert edited(edit) != GOOD
    with pytest.raises(CorruptCheckpointError, match=f"(?s)^manifest: .*{message}"):
        decode_manifest(edited(edit), "manifest")


@pytest.mark.parametrize("batch_bytes", [16, 300])
@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_found_in_small_batches(
    name: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "BATCH_BYTES", batch_bytes)
    with pytest.raises(CorruptCheckpointError, match=r"^manifest: "):
        decode_manifest(edited(REFUSED[name][0]), "manifest")
    assert encode_manifest(decode_manifest(GOOD, "manifest")) == GOOD


def test_unknown_dtype_is_not_reported_as_damage() -> None:
    with pytest.raises(FormatVersionError, match="array 'a': unknown dtype 'float7'"):
        decode_manifest(edited(put(*ARRAY_A, "dtype", "float7")), "manifest")


def test_manifest_round_trips_byte_for_byte() -> None:
    manifest = decode_manifest(GOOD, "manifest")
    assert encode_manifest(manifest) == GOOD
    assert manifest.part("data") is manifest.parts[1]
    assert manifest.part("other") is None


NAMES_OF_ARRAYS = st.text(max_size=9) | st.sampled_from(['},{"name":"', '"],["', '"],[[', '"dtype":', "\\", "\0"])


@pytest.mark.parametrize("batch_bytes", [16, 300, manifest.BATCH_BYTES])
@given(
    shapes(3).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))),
    st.sets(NAMES_OF_ARRAYS, min_size=1, max_size=5),
)
def test_every_written_manifest_is_decoded(batch_bytes: int, case: Any, names: set[str]) -> None:
    shape, boxes = case
    arrays = {name: np.zeros(shape, np.int16) for name in sorted(names)}
    committed = commit(MemoryBackend(), "/runs/a", arrays, StoreSettings(), boxes=dict.fromkeys(arrays, boxes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BATCH_BYTES", batch_bytes)
        assert decode_manifest(encode_manifest(committed.manifest), "manifest") == committed.manifest


def test_a_newer_version_says_what_to_upgrade() -> None:
    newer = edited(lambda c: c.update(format_version=3, parts="in some other form"))
    with pytest.raises(FormatVersionError, match=r"version 3, .*upgrade: pip install"):
        decode_manifest(newer, "manifest")


@pytest.mark.parametrize("at", [*range(0, 40), *range(40, len(GOOD), 37), len(GOOD) - 1])
def test_a_cut_manifest_is_refused(at: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="manifest: not valid"):
        decode_manifest(GOOD[:at], "manifest")


NAMES = [
    "../x", "/etc/passwd", "state/../../x", "state/..", "state/.", "state/", "state", "/state/x", "state//x", "COMMIT",
    "state/COMMIT", "manifest.json", "state/manifest.json", "state/.hidden", ".state/x", "state/-x", "state/a b",
    "state/a\0", "state/a\n", "state/\u00e9", "state/" + "x" * 201, "", "C:\\x", "state\\x", "other/x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_unsafe_file_name_is_refused(name: str) -> None:
    for place in ((*SEGMENT, 0, name), (*FILE, 0, name)):
        with pytest.raises(CorruptCheckpointError, match="is not a plain file"):
            decode_manifest(edited(put(*place)), "manifest")


@pytest.mark.parametrize("block_bytes", [-4096, 4097, MAX_BLOCK_BYTES + 4096, 1 << 41, 10**400])
def test_invalid_block_size_is_refused(block_bytes: int) -> None:
    data = GOOD.replace(b'"block_bytes":4194304', f'"block_bytes":{block_bytes}'.encode())
    assert data != GOOD
    with pytest.raises(CorruptCheckpointError, match=r"block_bytes is|not valid"):
        decode_manifest(data, "manifest")


@pytest.mark.parametrize("block_bytes", [4096, 4 << 20, MAX_BLOCK_BYTES])
def test_block_sizes_within_the_limits_are_accepted(block_bytes: int) -> None:
    content = msgspec.json.decode(GOOD)
    content.update(segments=[], parts=[], block_bytes=block_bytes)
    assert decode_manifest(msgspec.json.encode(content), "manifest").block_bytes == block_bytes


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", ".a", "-a", "COMMIT", "manifest.json", "a b", "\u00e9", "a\n"])
def test_unsafe_checkpointable_name_is_refused(name: str) -> None:
    assert not is_plain_name(name)
    with pytest.raises(CorruptCheckpointError, match="checkpointable names are not plain"):
        decode_manifest(edited(put("parts", 1, "name", name)), "manifest")


@pytest.mark.parametrize("key", [b'"format":"jaxckpt"', b'"digest":"xxh3-128"', b'"dtype":"float64"', b'"kind":"json"'])
def test_duplicate_key_is_refused(key: bytes) -> None:
    assert GOOD.count(key) >= 1
    with pytest.raises(CorruptCheckpointError, match="not in canonical form"):
        decode_manifest(GOOD.replace(key, key + b"," + key, 1), "manifest")


@pytest.mark.parametrize("change", ["spaces", "order", "escape", "exponent", "more after it"])
def test_non_canonical_encoding_is_refused(change: str) -> None:
    other = {
        "spaces": json.dumps(json.loads(GOOD)).encode(),
        "order": edited(lambda c: c.update(format=c.pop("format"))),
        "escape": GOOD.replace(b'"jaxckpt"', b'"\\u006aaxckpt"', 1),
        "exponent": GOOD.replace(b"1e-300", b"10e-301"),
        "more after it": GOOD + b" ",
    }[change]
    assert other != GOOD
    with pytest.raises(CorruptCheckpointError, match="not in canonical form"):
        decode_manifest(other, "manifest")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"format":' * 10_000, b'"\\ud800"'])
def test_arbitrary_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^manifest: not valid"):
        decode_manifest(data, "manifest")


def test_many_overlapping_chunks_are_refused_in_time() -> None:
    content = json.loads(GOOD)
    box, segment, offset, length, digests = content["parts"][0]["arrays"][1]["chunks"][0]
    chunks = [[[[number, number + 5]], segment, offset, length, digests] for number in range(0, 500_000, 5)]
    content["parts"][0]["arrays"][1].update(chunks=chunks, shape=[500_000])
    with in_time(), pytest.raises(CorruptCheckpointError, match="do not fill the segments"):
        decode_manifest(msgspec.json.encode(content), "manifest")
    assert box == [[0, 5]]


def test_info_never_decides_anything() -> None:
    content = msgspec.json.decode(GOOD, type=Manifest)
    assert content.info["big"] == 1 << 70
    assert decode_manifest(edited(put("info", {"format_version": 99, "parts": []})), "manifest").parts == content.parts


@pytest.mark.parametrize("key", ["custom_metadata", "metrics", "anything"])
def test_oversized_info_is_refused_before_decoding(key: str) -> None:
    data = GOOD.replace(b'"info":{', f'"info":{{"{key}":[{",".join(["[]"] * 2_000_000)}],'.encode())
    tracemalloc.start()
    with in_time():
        try:
            with pytest.raises(CorruptCheckpointError, match=r"^x: info of 6,000,\d+ bytes"):
                decode_manifest(data, "x")
            assert tracemalloc.get_traced_memory()[1] < len(data) * 2
        finally:
            tracemalloc.stop()


def test_duplicate_info_is_refused() -> None:
    large = f'"info":{{"a":[{",".join(["[]"] * 2_000_000)}]}},"info":{{'.encode()
    data = GOOD.replace(b'"info":{', large)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="x: not in canonical form"):
            decode_manifest(data, "x")
        assert tracemalloc.get_traced_memory()[1] < len(data) * 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("info", [None, [], "text", {"a": {"b": 1}}])
def test_info_is_an_object(info: Any) -> None:
    data = edited(put("info", info))
    if isinstance(info, dict):
        assert decode_manifest(data, "x").info == info
        data = data.replace(b'{"b":1}', b'{"b":1,"b":1}')
    with pytest.raises(CorruptCheckpointError, match=r"^x: not (valid: info|in canonical form)"):
        decode_manifest(data, "x")


def test_info_of_the_largest_size_is_accepted() -> None:
    room = MAX_INFO_BYTES - len(b'{"a":""}')
    assert len(decode_manifest(edited(put("info", {"a": "x" * room})), "x").info["a"]) == room
    with pytest.raises(CorruptCheckpointError, match="x: info of 1,048,577 bytes"):
        decode_manifest(edited(put("info", {"a": "x" * (room + 1)})), "x")


@pytest.mark.parametrize("shape", [[1 << 59, 0], [0, 1 << 29, 1 << 30], [0] * 64])
def test_largest_empty_shapes_are_accepted(shape: list[int]) -> None:
    array = decode_manifest(edited(put(*EMPTY, "shape", shape)), "manifest").parts[0].arrays[2]
    assert empty_array(array.shape, np.dtype(array.dtype)).shape == tuple(shape)
