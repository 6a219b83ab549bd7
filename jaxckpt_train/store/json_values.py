"""Plain data as JSON files hold it: strict JSON, and Python's own where a number is none (NaN, Infinity, -Infinity)."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.store.manifest import NOT_JSON


def encode_value(value: Any, *, is_strict: bool = False) -> bytes:
    """Plain data as JSON.

    Args:
        value: the data.
        is_strict: whether NaN and infinities are refused, as a manifest cannot hold them.

    Raises:
        UnsupportedLeafError: it would not come back as it is.
    """
    try:
        data = msgspec.json.encode(value)
        same = msgspec.json.decode(data) == value
        if not same and not is_strict:  # NaN, which is equal to nothing, and has become null as infinities have
            data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
            same = repr(json.loads(data)) == repr(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeafError(f"not JSON: {error}") from error
    if not same:
        numbers = ", nan" if is_strict else ""
        raise UnsupportedLeafError(f"would not come back from JSON as it is (a tuple{numbers}, a key that is no text?)")
    return data


def decode_value(data: Any) -> Any:
    """The data that is in a file of JSON, of ours or of another tool in Python.

    Raises:
        NOT_JSON: it is none.
    """
    try:
        return msgspec.json.decode(data)
    except NOT_JSON as error:
        found = _by_python(bytes(data))
        if found is None:
            raise error from None
        return found[0]


def decode_told(data: bytes, kind: Any = Any) -> Any:
    """What another tool in Python tells as JSON, for a manifest of ours: numbers that are none are text, such as "nan".

    Raises:
        NOT_JSON: it is none, or not of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        found = _by_python(data, parse_float=_number_or_text, parse_constant=_number_or_text)
        if found is None:
            raise error from None
        return msgspec.convert(found[0], kind)


def _by_python(data: bytes, **options: Any) -> tuple[Any] | None:
    """What Python reads of it, in a tuple; None: it is no JSON to Python either, or has text that is no Unicode."""
    try:
        found = json.loads(data.decode(), **options)
        msgspec.json.encode(found)
    except (ValueError, RecursionError):
        return None
    return (found,)


def _number_or_text(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else str(number)
