"""Long JSON lists are decoded lazily, in batches, into the same elements."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.store import manifest
from jaxckpt_train.store.manifest import BATCH_BYTES, elements, length

texts = st.text(max_size=30) | st.sampled_from(['},{"name":"', "},{", '\\},{"', '"},{"name":"', "name", '}]},{"name":'])
plain_texts = st.text("ab/.", max_size=30)
records = st.tuples(plain_texts, st.integers(), st.lists(st.integers(), max_size=9), plain_texts).map(list)
BETWEEN = b'"],["'


def an_object(name: str, more: list[str]) -> dict[str, Any]:
    return {"name": name, "more": more}


objects = st.builds(an_object, texts, st.lists(texts, max_size=3))


def read(raw: bytes, between: bytes = BETWEEN) -> list[Any]:
    return list(elements(msgspec.Raw(raw), between, msgspec.json.decode, msgspec.json.decode))


@pytest.mark.parametrize("batch_bytes", [16, 50, 200, BATCH_BYTES])
@given(st.lists(records, max_size=20))
def test_a_list_of_lists_is_read(batch_bytes: int, found: list[Any]) -> None:
    raw = msgspec.json.encode(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BATCH_BYTES", batch_bytes)
        assert read(raw) == json.loads(raw)
        assert length(msgspec.Raw(raw), BETWEEN) == len(found)


@pytest.mark.parametrize("batch_bytes", [16, 50, BATCH_BYTES])
@given(st.lists(objects, max_size=20))
def test_a_list_of_objects_is_read(batch_bytes: int, found: list[Any]) -> None:
    raw = msgspec.json.encode(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BATCH_BYTES", batch_bytes)
        assert read(raw, b'},{"name":"') == found
        assert length(msgspec.Raw(raw), b'},{"name":"') == len(found)


def test_elements_are_decoded_in_batches() -> None:
    made = list[int]()

    def decode(text: Any) -> list[Any]:
        made.append(len(text))
        return msgspec.json.decode(text)

    raw = msgspec.Raw(msgspec.json.encode([["x" * 50, "y"]] * 10_000))
    found = elements(raw, BETWEEN, decode, decode)
    assert len(list(itertools.islice(found, 1))) == 1
    assert len(made) == 1
    assert made[0] <= BATCH_BYTES + 2
    assert sum(1 for _ in found) == 9_999
    assert max(made) <= BATCH_BYTES + 2


def test_element_larger_than_a_batch_comes_alone() -> None:
    large = ["x" * BATCH_BYTES, "y"]
    alone = list[int]()

    def decode_one(text: memoryview) -> Any:
        alone.append(len(text))
        return msgspec.json.decode(text)

    raw = msgspec.Raw(msgspec.json.encode([["a", "b"], large, large, ["c", "d"]]))
    assert list(elements(raw, BETWEEN, msgspec.json.decode, decode_one))[1:3] == [large, large]
    assert alone == [len(msgspec.json.encode(large))] * 2


@pytest.mark.parametrize("raw", [b"5", b'{"a":1}', b'"],["', b"null", b"[1,]", b"[{]", b"[,]"])
def test_non_list_is_refused(raw: bytes) -> None:
    decoder = msgspec.json.Decoder(list[int])
    with pytest.raises(msgspec.DecodeError):
        list(elements(msgspec.Raw(raw), BETWEEN, decoder.decode, msgspec.json.decode))
