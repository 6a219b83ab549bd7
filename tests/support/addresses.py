"""Addresses of what other processes of a machine may look at, with something wrong in them."""

from __future__ import annotations

from typing import Any

import msgspec


def changed(address: bytes, place: int, value: Any) -> bytes:
    """One with another value at a place."""
    fields = msgspec.msgpack.decode(address)
    fields[place] = value
    return msgspec.msgpack.encode(fields)
