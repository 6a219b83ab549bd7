"""A segment's head: encoded as safetensors reads it, and nothing believed that a stranger could have put there."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.dtypes import SAFETENSORS_ITEM_BYTES
from jaxckpt_train.store.segment import (
    MAX_HEADER_BYTES,
    Tensor,
    decode_header,
    encode_header,
    header_length,
    header_share_bytes,
)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[Tensor]:
    """Tensors that fill a data section one after the other."""
    found, end = [], 0
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), unique=True, max_size=8))
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(SAFETENSORS_ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        size = SAFETENSORS_ITEM_BYTES[dtype]
        for side in shape:
            size *= side
        found.append(Tensor(name, dtype, shape, end, end + size))
        end += size
    return found


def head_of(text: bytes, padding: int = 0) -> bytes:
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def decode(entries: Any, data_bytes: int) -> Any:
    head = head_of(entries if isinstance(entries, bytes) else json.dumps(entries).encode())
    return decode_header(head, len(head) + data_bytes, "file")


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(tensor_lists(), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("abc")))
def test_a_head_goes_there_and_back(tensors: list[Tensor], metadata: dict[str, str]) -> None:
    head = encode_header(tensors, metadata)
    end = tensors[-1].stop if tensors else 0
    assert len(head) % 4096 == 0
    assert header_length(head[:8], len(head) + end, "file") == len(head)
    header = decode_header(head, len(head) + end, "file")
    assert sorted(header.tensors, key=lambda t: t.name) == sorted(tensors, key=lambda t: t.name)
    assert header.data_start == len(head)
    assert header.metadata == metadata


@given(tensor_lists())
def test_the_share_of_a_tensor_is_never_underestimated(tensors: list[Tensor]) -> None:
    head = encode_header(tensors)
    text = head[8:].rstrip(b" ")
    assert len(text) <= 2 + sum(header_share_bytes(tensor.name, len(tensor.shape)) for tensor in tensors)


@given(tensor_lists(), st.randoms())
def test_a_cut_head_is_refused(tensors: list[Tensor], chance: random.Random) -> None:
    head = encode_header(tensors)
    text = head[8:].rstrip(b" ")
    at = chance.randrange(len(text))
    with pytest.raises(CorruptCheckpointError, match=r"^file: "):
        decode(text[:at], tensors[-1].stop if tensors else 0)


@pytest.mark.parametrize("present", range(8))
def test_a_file_shorter_than_its_length_is_refused(present: int) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"file: {present} bytes are too few"):
        header_length(bytes(present), present, "file")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 993, (1 << 64) - 1, 1 << 63])
def test_a_length_beyond_the_limit_or_the_file_is_refused(length: int) -> None:
    size = 1 << 40 if length == MAX_HEADER_BYTES + 1 else 1000
    with pytest.raises(CorruptCheckpointError, match=f"header says {length} bytes, in a file of {size}"):
        header_length(length.to_bytes(8, "little"), size, "file")


HOSTILE: dict[str, tuple[Any, int, str]] = {
    "empty": (b"", 0, "does not start with"),
    "a space first": (b' {"a":1}', 0, "does not start with"),
    "a list": (b"[]", 0, "does not start with"),
    "byte order mark": (b"\xef\xbb\xbf{}", 0, "does not start with"),
    "utf-16": ("{}".encode("utf-16-le"), 0, "not JSON"),
    "bad utf-8": (b'{"\xff":1}', 0, "not JSON"),
    "not closed": (b'{"a":', 0, "not JSON"),
    "more after it": (b"{}{}", 0, "not JSON"),
    "zeros after it": (b"{}\0\0", 0, "not JSON"),
    "NaN": (b'{"a":NaN}', 0, "NaN in the header"),
    "infinity": (b'{"a":-Infinity}', 0, "-Infinity in the header"),
    "deep": (b'{"a":' + b"[" * 200_000, 0, "not JSON"),
    "deep and closed": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "not JSON"),
    "a number of 100,000 digits": (b'{"a":' + b"9" * 100_000 + b"}", 0, "not JSON"),
    "key twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}', 0, "a key appears twice"),
    "inner key twice": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1, "appears twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "not a map of text to text"),
    "metadata is a list": ({"__metadata__": []}, 0, "not a map of text to text"),
    "entry is a list": ({"a": []}, 0, "lacks dtype, shape or data_offsets"),
    "field missing": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "lacks dtype"),
    "field too many": ({"a": {**entry(), "more": 1}}, 4, "or has more"),
    "unknown dtype": ({"a": entry("F8_E4M3")}, 4, "'F8_E4M3'.* does not fit"),
    "dtype is a list": ({"a": entry(["U8"])}, 4, "does not fit"),
    "dtype is null": ({"a": entry(None)}, 4, "does not fit"),
    "bool in the shape": ({"a": entry(shape=[True, 4])}, 4, "has shape"),
    "float in the shape": ({"a": entry(shape=[4.0])}, 4, "has shape"),
    "text in the shape": ({"a": entry(shape=["4"])}, 4, "has shape"),
    "negative shape": ({"a": entry(shape=[-2, -2])}, 4, "has shape"),
    "shape is a number": ({"a": entry(shape=4)}, 4, "has shape"),
    "65 dimensions": ({"a": entry(shape=[1] * 64 + [4])}, 4, "has shape"),
    "huge shape": ({"a": entry(shape=[1 << 62])}, 4, "has shape"),
    "a shape that wraps around 64 bits": ({"a": entry(shape=[1 << 33, 1 << 31, 4])}, 0, "does not fit"),
    "bool in the offsets": ({"a": entry(shape=[1], offsets=[False, True])}, 1, "has shape"),
    "negative offset": ({"a": entry(offsets=[-4, 0])}, 4, "has shape"),
    "offsets the wrong way": ({"a": entry(offsets=[4, 0])}, 4, "does not fit"),
    "overflowing offset": ({"a": entry(offsets=[1 << 62, (1 << 62) + 4])}, 4, "has shape"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, 4, "has shape"),
    "too short for its shape": ({"a": entry(offsets=[0, 3])}, 3, "does not fit"),
    "hole at the start": ({"a": entry(offsets=[1, 5])}, 5, "starts at 1, expected 0"),
    "hole between": ({"a": entry(), "b": entry(offsets=[5, 9])}, 9, "starts at 5, expected 4"),
    "overlap": ({"a": entry(), "b": entry(offsets=[3, 7])}, 7, "starts at 3, expected 4"),
    "the same bytes": ({"a": entry(), "b": entry()}, 4, "starts at 0, expected 4"),
    "trailing bytes": ({"a": entry()}, 5, "tensors end at byte .* of"),
    "beyond the end": ({"a": entry()}, 3, "tensors end at byte .* of"),
    "no tensor, but data": ({}, 1, "tensors end at byte"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused(name: str) -> None:
    entries, data_bytes, message = HOSTILE[name]
    with pytest.raises(CorruptCheckpointError, match=f"(?s)^file: .*{message}"):
        decode(entries, data_bytes)


def test_64_dimensions_are_fine_and_so_is_nothing() -> None:
    assert decode({"a": entry(shape=[1] * 63 + [4])}, 4).tensors[0].shape == (1,) * 63 + (4,)
    assert decode({"a": entry(shape=[0, 1 << 61], offsets=[0, 0])}, 0).tensors[0].stop == 0


def test_a_million_tensors_of_no_elements_that_the_manifest_does_not_have_cost_nothing() -> None:
    text = b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(10**6)) + b"}"
    head = len(text).to_bytes(8, "little") + text
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CorruptCheckpointError, match="more tensors than the manifest"):
            decode_header(head, len(head), "file", most_objects=12)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1


@pytest.mark.parametrize("kind", ["deep", "many keys", "large numbers", "long name"])
def test_time_and_memory_of_a_refusal_grow_with_the_file_only(kind: str) -> None:
    text = {
        "deep": b'{"a":' + b'{"a":' * (1 << 18),
        "many keys": b"{" + b",".join(b'"%d":0' % n for n in range(1 << 17)) + b"}",
        "large numbers": b'{"a":[' + b",".join([b"9" * 4000] * 400) + b"]}",
        "long name": b'{"' + b"n" * (1 << 21) + b'":0}',
    }[kind]
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CorruptCheckpointError, match=r"^file: "):
            decode(text, 1 << 40)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5
    assert peak < 40 * len(text)
