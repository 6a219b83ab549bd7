"""The JSON form of an iterator's state: each value comes back with its type."""

from __future__ import annotations

import collections
import enum
import math
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxckpt_train.checkpointables.iterator_state import decode_state, encode_state
from jaxckpt_train.errors import UnsupportedLeafError
from tests.support.in_time import in_time

NUMPY_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
)
NUMPY = st.one_of(
    hnp.arrays(NUMPY_DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    NUMPY_DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()]),
)
TEXT = st.text(st.characters(codec="utf-8"))
KEYS = st.one_of(TEXT, st.integers(), st.booleans(), st.tuples(st.integers(), TEXT), st.just("__numpy__"))
STATES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(), NUMPY),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def through_json(state: Any) -> Any:
    encoded = encode_state(state)
    text = msgspec.json.encode(encoded)
    assert msgspec.json.decode(text) == encoded
    return decode_state(msgspec.json.decode(text))


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert [type(key) for key in found] == [type(key) for key in expected]
        for key, item in expected.items():
            assert_same(found[key], item)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert (found == expected and math.copysign(1, found) == math.copysign(1, expected)) or (found != found)
    else:
        assert found == expected


@given(STATES)
def test_every_plain_state_comes_back_unchanged(state: Any) -> None:
    assert_same(through_json(state), state)


@pytest.mark.parametrize(
    "state",
    [
        {"__numpy__": ["int64", 5]},
        {"__numpy__": ["<i8", None, 5]},
        {"__dict__": []},
        {"__tuple__": [1]},
        {"__int__": "0x1", "other": 1},
        [{"__bytes__": {"__bytes__": "AA=="}}],
    ],
)
def test_user_dict_that_looks_like_tag_survives(state: Any) -> None:
    assert_same(through_json(state), state)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (np.int64(5), {"__numpy__": ["<i8", None, 5]}),
        (np.uint64(2**64 - 1), {"__numpy__": ["<u8", None, 2**64 - 1]}),
        (np.bool_(True), {"__numpy__": ["|b1", None, True]}),
        (np.arange(6, dtype=np.int16).reshape(2, 3), {"__numpy__": ["<i2", [2, 3], [0, 1, 2, 3, 4, 5]]}),
        (np.float32([1.0, 2.0]), {"__numpy__": ["<f4", [2], "AACAPwAAAEA="]}),
        (2**100, {"__int__": hex(2**100)}),
        (math.inf, {"__float__": "inf"}),
        ((1, "a"), {"__tuple__": [1, "a"]}),
        ({3: "a"}, {"__dict__": [[3, "a"]]}),
    ],
)
def test_the_written_form_stays_readable_by_later_versions(value: Any, encoded: Any) -> None:
    assert encode_state(value) == encoded
    assert_same(decode_state(encoded), value)


@pytest.mark.parametrize(
    "value", [np.str_(""), np.str_("né"), np.bytes_(b"ab"), np.array(["a", "bcd"]), np.array([], "S3")]
)
def test_numpy_text_comes_back(value: Any) -> None:
    assert_same(through_json(value), value)


def test_the_state_of_a_numpy_generator_comes_back() -> None:
    generator = np.random.default_rng(7)
    generator.random(3)
    other = np.random.default_rng(8)
    other.bit_generator.state = through_json(generator.bit_generator.state)
    assert other.random(5).tobytes() == generator.random(5).tobytes()


def test_encoded_state_shares_no_memory_with_original() -> None:
    state = {"list": [1], "inner": {"a": 1}, "array": np.zeros(2)}
    encoded = encode_state(state)
    state["list"].append(2)
    state["inner"]["a"] = 2
    state["array"][0] = 1
    assert_same(decode_state(encoded), {"list": [1], "inner": {"a": 1}, "array": np.zeros(2)})


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "lock"),
        ({1, 2}, "builtins.set"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (Colour.RED, "Colour"),
        (Point(1), "Point"),
        (jnp.zeros(2), "ArrayImpl"),
        (np.array([None]), "dtype object"),
        (np.zeros(1, [("a", "i4")]), "dtype"),
        (jnp.bfloat16(1).dtype.type(1), "dtype bfloat16"),
        (np.bytes_(b"a\0"), "ends with zeros"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_values_json_cannot_keep_are_refused_with_path(value: Any, name: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=rf"state\['parent'\]\['rows'\]\[1\] is .*{name}"):
        encode_state({"parent": {"rows": [0, value]}})


def test_unstorable_key_is_refused_with_path() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"key of state\['seen'\] .*frozenset"):
        encode_state({"seen": {frozenset({1}): True}})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        encode_state(state)


@pytest.mark.parametrize(
    "data",
    [
        {"__numpy__": ["<i8", None]},
        {"__numpy__": ["O", None, 1]},
        {"__numpy__": ["i4,i4", None, "AAAAAAAAAAA="]},
        {"__numpy__": ["<i1", None, 1000]},
        {"__numpy__": ["<f8", [1000000000], "AAAA"]},
        {"__numpy__": ["no dtype", None, 1]},
        {"__numpy__": ["(1,,)i4", None, 5]},
        {"__numpy__": ["(" * 5000, None, 5]},
        {"__numpy__": [[["a", "i4"]], None, 5]},
        {"__numpy__": ["<M8[99999999999s]", None, ""]},
        {"__numpy__": ["<f4", [1 << 62, 0], ""]},
        {"__float__": "0x1p99999"},
        {"__numpy__": 5},
        {"__int__": 5},
        {"__float__": "x"},
        {"__bytes__": "?"},
        {"__tuple__": None},
        {"__dict__": [[1]]},
        {"__dict__": [[[1], 2]]},
    ],
)
def test_malformed_data_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="malformed __"):
        decode_state({"parent": [data]})


def test_deeply_malformed_data_is_reported_once() -> None:
    data: Any = [{"__int__": "?"}, list(range(100_000))]
    for _ in range(200):
        data = {"__tuple__": [data]}
    with in_time(), pytest.raises(ValueError, match=r"malformed __int__: '\?'$"):
        decode_state(data)


@pytest.mark.parametrize("unit", ["", "[Y]", "[W]", "[us]", "[as]", "[25s]"])
def test_times_of_every_unit_come_back(unit: str) -> None:
    assert_same(through_json(np.zeros(2, f"<m8{unit}")), np.zeros(2, f"<m8{unit}"))
