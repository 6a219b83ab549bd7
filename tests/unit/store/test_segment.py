"""The header of a segment is a valid safetensors header, and only its exact bytes are accepted."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxckpt_train.formats.safetensors import NAMED
from jaxckpt_train.store.segment import DTYPES, Tensor, encode_header, header_share_bytes, is_head_of
from tests.nightly.faults.mutations import changed
from tests.support.in_time import in_time
from tests.support.tiers import nightly_after

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[Tensor]:
    """Draw consecutive tensors that fill a data section."""
    found, end = [], 0
    for name in draw(st.lists(texts, unique=True, max_size=8)):
        dtype = draw(st.sampled_from(sorted(NAMED)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        size = DTYPES[NAMED[dtype]].itemsize
        for side in shape:
            size *= side
        found.append(Tensor(name, dtype, shape, end, end + size))
        end += size
    return found


def is_head(head: bytes, tensors: list[Tensor]) -> bool:
    return is_head_of(memoryview(head), tensors)


@given(tensor_lists())
def test_header_describes_its_tensors(tensors: list[Tensor]) -> None:
    head = encode_header(tensors)
    assert len(head) % 4096 == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    entries = json.loads(head[8:])
    assert [(name, *entry.values()) for name, entry in entries.items()] == [
        (tensor.name, tensor.dtype, list(tensor.shape), [tensor.start, tensor.stop]) for tensor in tensors
    ]
    assert is_head(head, tensors)


@given(tensor_lists())
def test_header_share_is_never_underestimated(tensors: list[Tensor]) -> None:
    text = encode_header(tensors)[8:].rstrip(b" ")
    assert len(text) <= 2 + sum(header_share_bytes(tensor.name, len(tensor.shape)) for tensor in tensors)


@given(tensor_lists(), tensor_lists())
def test_header_of_other_tensors_is_refused(tensors: list[Tensor], others: list[Tensor]) -> None:
    assume(tensors != others)
    assert not is_head(encode_header(tensors), others)


@given(tensor_lists(), st.randoms())
def test_changed_header_is_refused(tensors: list[Tensor], chance: random.Random) -> None:
    head = encode_header(tensors)
    other = changed(head, chance)
    assert is_head(other, tensors) == (other == head)


@given(tensor_lists(), st.integers(0, 5000))
def test_cut_header_is_refused(tensors: list[Tensor], at: int) -> None:
    head = encode_header(tensors)
    assert not is_head(head[: at % len(head)], tensors)


@given(st.binary(max_size=100), tensor_lists())
def test_arbitrary_bytes_are_no_header(head: bytes, tensors: list[Tensor]) -> None:
    assert not is_head(head, tensors)


A, B = Tensor("a", "U8", (4,), 0, 4), Tensor("b", "F32", (2, 1), 4, 12)
TEXT = encode_header([A, B])[8:].rstrip(b" ")


def head_of(text: bytes, size: int = 4096) -> bytes:
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "spaces": lambda text: json.dumps(json.loads(text)).encode(),
    "another order": lambda text: json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")).encode(),
    "a tensor twice": lambda text: b"{" + text[1:-1] + b"," + text[1:],
    "a key twice": lambda text: text.replace(b'"dtype":"U8"', b'"dtype":"U8","dtype":"U8"'),
    "an escaped letter": lambda text: text.replace(b'"a"', b'"\\u0061"'),
    "metadata": lambda text: b'{"__metadata__":{},' + text[1:],
    "one more without elements": lambda text: text[:-1] + b',"c":{"dtype":"U8","shape":[0],"data_offsets":[12,12]}}',
    "one less": lambda text: encode_header([A])[8:].rstrip(b" "),
    "zeros after it": lambda text: text + b"\0",
    "something after it": lambda text: text + b" {}",
    "a line break after it": lambda text: text + b"\n",
    "NaN": lambda text: text.replace(b"[4]", b"[NaN]"),
    "a number of 5,000 digits": lambda text: text.replace(b"[4]", b"[" + b"9" * 3000 + b"]"),
    "deep": lambda text: text.replace(b"[4]", b"[" * 3000),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_encoding_of_header_is_refused(name: str) -> None:
    assert is_head(head_of(TEXT), [A, B])
    assert OTHERS[name](TEXT) != TEXT
    assert not is_head(head_of(OTHERS[name](TEXT)), [A, B])


def test_header_of_unusual_length_is_refused() -> None:
    sound = head_of(TEXT)
    assert sound == encode_header([A, B])
    for other in (head_of(TEXT, 8192), sound[:-1], sound + b" ", sound + b" " * 4096, b"\0" * 8 + sound[8:]):
        assert not is_head(other, [A, B])


def test_duplicate_tensor_names_have_no_header() -> None:
    twins = [A, Tensor("a", "U8", (4,), 4, 8)]
    pieces = [encode_header([tensor])[8:].rstrip(b" ")[1:-1] for tensor in twins]
    assert not is_head(head_of(b"{" + b",".join(pieces) + b"}"), twins)


def test_header_without_tensors_is_one_page() -> None:
    assert encode_header([]) == head_of(b"{}")
    assert is_head(head_of(b"{}"), [])
    assert not is_head(head_of(b"{"), [])


@pytest.mark.parametrize(
    "kind", nightly_after(3, ["deep", "long name", "zeros", "tensors", "many keys", "large numbers", "lists"])
)
def test_hostile_header_is_refused_cheaply(kind: str) -> None:
    text = {
        "tensors": b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(10**6)),
        "deep": b'{"a":' + b'{"a":' * (1 << 18),
        "many keys": b"{" + b",".join(b'"%d":0' % n for n in range(1 << 19)) + b"}",
        "large numbers": b'{"a":[' + b",".join([b"9" * 5000] * 2000) + b"]}",
        "lists": b'{"a":[' + b",".join([b"[]"] * 2_000_000) + b"]}",
        "long name": b'{"' + b"n" * (1 << 23) + b'":0}',
        "zeros": bytes(64 << 20),
    }[kind]
    head = len(text).to_bytes(8, "little") + text
    for tensors in ([], [A, B]):
        with in_time():
            tracemalloc.start()
            try:
                assert not is_head(head, tensors)
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()
