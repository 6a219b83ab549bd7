"""Long JSON lists, read as short ones: what is refused at its beginning takes no memory for its rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

BATCH_BYTES = 64 << 10
T = TypeVar("T")


def elements(
    raw: msgspec.Raw, between: bytes, decode_some: Callable[[Any], list[T]], decode_one: Callable[[Any], T]
) -> Iterator[T]:
    """The elements of a list, of which few are decoded before the first is handed out.

    Args:
        raw: the list, without white space.
        between: what stands between two elements and nowhere within one: the end of one, a comma, a beginning. A list
            in which it stands elsewhere is in no form of ours, and is refused as soon as it is cut there.
        decode_some: from a list of at most 64 KiB.
        decode_one: from one element that is larger. It may take many times that much memory, unless this looks at it
            first.

    Raises:
        msgspec.MsgspecError: it is no list of these.
    """
    view = memoryview(raw)
    if bytes(view[:1]) != b"[":
        yield from decode_some(view)  # which says what it is instead
        return
    start, end = 1, len(view) - 1
    while start < end:
        stop = _cut(view, start, end, between)
        if stop - start <= BATCH_BYTES:
            yield from decode_some(b"[" + view[start:stop] + b"]")
        else:
            yield decode_one(view[start:stop])
        start = stop + 1


def length(raw: msgspec.Raw, between: bytes) -> int:
    """How many elements a list in our form has, without making one of them."""
    view, overlap = memoryview(raw), len(between) - 1
    windows = range(0, len(view), BATCH_BYTES)
    return (len(view) > 2) + sum(bytes(view[at : at + BATCH_BYTES + overlap]).count(between) for at in windows)


def _cut(view: memoryview, start: int, end: int, between: bytes) -> int:
    """Where as many elements as go into a batch end, but not before the first does."""
    if end - start <= BATCH_BYTES:
        return end
    comma = between.index(b",")
    found = bytes(view[start : start + BATCH_BYTES]).rfind(between)
    if found >= 0:
        return start + found + comma
    overlap = len(between) - 1
    for at in range(start + BATCH_BYTES - overlap, end, BATCH_BYTES):
        found = bytes(view[at : at + BATCH_BYTES + overlap]).find(between)
        if found >= 0:
            return at + found + comma
    return end
