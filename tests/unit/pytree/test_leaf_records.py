"""Leaf records: every Python value is stored exactly, and nothing else is accepted."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.pytree import leaves
from jaxckpt_train.pytree.flatten import check_storable
from jaxckpt_train.pytree.leaves import (
    ArrayLeaf,
    ComplexLeaf,
    FloatLeaf,
    IntLeaf,
    TreeRecord,
    decode_tree,
    encode_tree,
    python_value,
    record_value,
)
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(max_size=40),
)


def part_of(record: TreeRecord, *arrays: str) -> PartRecord:
    found = tuple(ArrayRecord(name, (0,), "float32", ()) for name in arrays)
    return PartRecord("state", "pytree", found, (), encode_tree(record))


def through_manifest(value: Any) -> Any:
    record = record_value("x", value)
    assert record is not None
    decoded = decode_tree(part_of(TreeRecord({}, {"x": record})), "here")
    return python_value("x", decoded.leaves["x"], "here")


@given(values)
def test_python_values_survive_with_their_type(value: Any) -> None:
    found = through_manifest(value)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, float):
        assert struct.pack("<d", found) == struct.pack("<d", value)  # -0.0 is not 0.0


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**64, -(2**64), 2**64 - 1], ids=int.bit_length)
def test_integers_of_any_size(value: int) -> None:
    assert through_manifest(value) == value


@pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, 5e-324, 0.1, math.nan])
def test_unusual_floats_and_complex_numbers(value: float) -> None:
    assert repr(through_manifest(value)) == repr(value)
    assert repr(through_manifest(complex(value, -value))) == repr(complex(value, -value))


def test_only_plain_values_have_inline_records() -> None:
    class Number(int):
        pass

    for value in (np.float64(1.0), np.int32(1), np.bool_(True), Number(3), np.arange(2), object()):
        assert record_value("x", value) is None


def test_overlong_or_invalid_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"leaf 'x': .*Unicode"):
        record_value("x", "\ud800")
    monkeypatch.setattr(leaves, "MAX_INLINE_BYTES", 10)
    for value in ("a" * 11, b"a" * 11):
        with pytest.raises(UnsupportedLeafError, match=r"leaf 'x': .* 11, expected at most 10"):
            record_value("x", value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), r"leaf 'x': a builtins.object cannot be stored; expected arrays, numbers.*register a handler"),
        ({1, 2}, "a builtins.set cannot be stored"),
        (np.array(["a"]), "numpy dtype <U1 cannot be stored, .*; convert it"),
        (np.array([None]), "numpy dtype object cannot be stored"),
        (np.array("2020", "M8[Y]"), "no fixed binary representation"),
        (np.zeros(2, [("a", "f4")]), "no fixed binary representation"),
        (np.zeros(2, np.longdouble), "no fixed binary representation"),
        (np.str_("text"), "no fixed binary representation"),
        (np.ma.masked_array([1, 2]), "MaskedArray cannot be stored"),
    ],
)
def test_unsupported_leaf_error_says_how_to_convert(value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=reason):
        check_storable("x", value)


@pytest.mark.parametrize(
    "record",
    [IntLeaf("seven"), IntLeaf(""), IntLeaf("1.5"), FloatLeaf("x"), FloatLeaf("0x1p99999"), ComplexLeaf("1", "?")],
)
def test_invalid_number_record_is_corrupt(record: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="here: leaf 'x'"):
        python_value("x", record, "here")


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        (b"null", "tree of 'state'"),
        (b'{"containers":{},"leaves":{"x":{"kind":"pickle","value":"cos"}}}', "kind"),
        (b'{"containers":{},"leaves":{"x":{"kind":"int","value":"1","more":2}}}', "more"),
        (b'{"containers":{},"leaves":{"x":{"kind":"int","value":"1"},"x":{"kind":"int","value":"2"}}}', "canonical"),
        (b'{"containers": {},"leaves":{}}', "not in canonical form"),
        (b'{"containers":{},"leaves":{"x":{"kind":"array"}}}', "does not match its arrays"),
        (b'{"containers":{},"leaves":{"' + b"a/" * 200 + b'a":{"kind":"none"}}}', "deeper than 200 levels"),
    ],
)
def test_tree_record_not_in_written_form_is_corrupt(detail: bytes, reason: str) -> None:
    part = PartRecord("state", "pytree", (), (), msgspec.Raw(detail))
    with pytest.raises(CorruptCheckpointError, match=f"here: tree of 'state'.*{reason}|{reason}"):
        decode_tree(part, "here")


def test_array_that_tree_does_not_know_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError, match="does not match its arrays"):
        decode_tree(part_of(TreeRecord({}, {"a": ArrayLeaf()}), "a", "b"), "here")
