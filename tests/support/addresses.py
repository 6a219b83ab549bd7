"""Damaged addresses of shared memory."""

from __future__ import annotations

from typing import Any

import msgspec


def changed(address: bytes, place: int, value: Any) -> bytes:
    """Return the address with another value in one field."""
    fields = msgspec.msgpack.decode(address)
    fields[place] = value
    return msgspec.msgpack.encode(fields)
