"""The state of a data iterator as JSON data, without loss.

JSON has no tuples, no numpy values, no keys but text. Each of these is written as an object with one key, its tag:

    {"__numpy__": ["<i8", null, 5]}             a scalar; integers and booleans as numbers,
    {"__numpy__": ["<f4", [2], "AACAPwAAAEA="]}  everything else as base64 of the row-major bytes
    {"__tuple__": [...]}    {"__bytes__": "..."}    {"__int__": "0x..."}  beyond 64 bits    {"__float__": "nan"}
    {"__dict__": [[key, value], ...]}           keys that are no text, or one key that is itself a tag
"""

from __future__ import annotations

import base64
import math
import re
import reprlib
from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.contract import Json
from jaxckpt_train.errors import UnsupportedLeafError

# What `dtype.str` is for these kinds. Numpy evaluates other texts, and may raise whatever comes of it.
_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]{1,10}|[mM]8(\[[0-9]{0,10}[a-zA-Z]{1,7}\])?)")
_TAGS = frozenset({"__numpy__", "__tuple__", "__bytes__", "__int__", "__float__", "__dict__"})
_READABLE_KINDS = "biu"  # numpy kinds whose elements are written as numbers
_OTHER_KINDS = "fcmMSU"  # and those written as bytes; objects, records and foreign dtypes are refused


class _MalformedTagError(ValueError):
    """A tag with other content than `encode_state` writes; not told again by each tag around it."""


def encode_state(state: Any) -> Json:
    """A copy of the state as plain JSON data; `decode_state` gives back the same values of the same types.

    Args:
        state: None, bool, int, float, str, bytes, numpy scalars and arrays, and lists, tuples and dicts of these.

    Raises:
        UnsupportedLeafError: a value of another type; the message names its path inside the state.
    """
    try:
        return _encode(state, "state")
    except RecursionError as error:
        raise UnsupportedLeafError("iterator state: nested too deep, or it contains itself") from error


def decode_state(data: Json) -> Any:
    """The state that `encode_state` wrote, in containers of its own.

    Raises:
        ValueError: the data has a tag with other content than `encode_state` writes.
    """
    if isinstance(data, list):
        return [decode_state(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _TAGS:
            try:
                return _decode_tagged(tag, content)
            except _MalformedTagError:
                raise
            except (TypeError, ValueError, OverflowError) as error:
                raise _MalformedTagError(f"iterator state: malformed {tag}: {reprlib.repr(content)}") from error
    return {key: decode_state(item) for key, item in data.items()}


def _encode(value: Any, path: str) -> Json:
    # Exact types: a subclass (an OrderedDict, an IntEnum, a named tuple) would come back as something less.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"__int__": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"__float__": value.hex()}
    if kind is str:
        return _checked_text(value, path)
    if kind is bytes:
        return {"__bytes__": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"__tuple__": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if kind is dict:
        return _encode_dict(value, path)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_numpy(value, path)
    raise UnsupportedLeafError(
        f"iterator state: {path} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold without losing "
        "something; let get_state return plain data: None, bool, int, float, str, bytes, numpy, list, tuple, dict"
    )


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(f"iterator state: {path} is text that is not valid Unicode: {text!r}") from error
    return text


def _encode_dict(value: dict[Any, Any], path: str) -> Json:
    items = [(key, _encode(item, f"{path}[{key!r}]")) for key, item in value.items()]
    if all(type(key) is str for key in value) and not (len(value) == 1 and _TAGS.issuperset(value)):
        return {_checked_text(key, f"a key of {path}"): item for key, item in items}
    return {"__dict__": [[_encode(key, f"a key of {path}"), item] for key, item in items]}


def _encode_numpy(value: Any, path: str) -> Json:
    dtype = value.dtype
    if dtype.kind not in _READABLE_KINDS + _OTHER_KINDS:
        raise UnsupportedLeafError(
            f"iterator state: {path} is numpy of dtype {dtype}, which JSON cannot hold; use numbers, booleans or text"
        )
    array = np.asarray(value)
    if dtype.kind in "SU" and np.any(array[()] != value):
        raise UnsupportedLeafError(f"iterator state: {path} is numpy text that ends with zeros, which numpy would drop")
    flat: list[Any] = array.ravel().tolist()
    is_array = isinstance(value, np.ndarray)
    data: Json = base64.b64encode(array.tobytes()).decode()
    if dtype.kind in _READABLE_KINDS:
        data = flat if is_array else flat[0]
    return {"__numpy__": [dtype.str, list(value.shape) if is_array else None, data]}


def _decode_tagged(tag: str, content: Json) -> Any:
    if tag == "__numpy__":
        return _decode_numpy(*content)
    if tag == "__tuple__":
        return tuple(decode_state(item) for item in content)
    if tag == "__bytes__":
        return base64.b64decode(content, validate=True)
    if tag == "__int__":
        return int(content, 16)
    if tag == "__float__":
        return float.fromhex(content)
    return {decode_state(key): decode_state(item) for key, item in content}


def _decode_numpy(dtype_text: str, shape: list[int] | None, data: Json) -> Any:
    if not _DTYPE.fullmatch(dtype_text):
        raise ValueError(f"dtype {dtype_text!r:.100}")
    dtype = np.dtype(dtype_text)
    if dtype.kind in _READABLE_KINDS:
        array = np.array(data, dtype=dtype).reshape(shape or ())
    else:
        array = np.ndarray(shape or (), dtype, buffer=bytearray(base64.b64decode(data, validate=True)))
    return array[()] if shape is None else array
