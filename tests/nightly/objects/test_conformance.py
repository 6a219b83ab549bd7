"""The stand-in and the real servers answer the same calls of obstore alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import obstore
import pytest
from obstore.exceptions import BaseError

from tests.support.objects.access import Access
from tests.support.objects.servers import SERVERS
from tests.support.objects.stand_in import StandIn

DATA = os.urandom(11 * 2**20)
# What a server is known to do otherwise; see `tests.support.objects.servers`.
KNOWN = {
    "moto": set[str](),
    "versitygw": set[str](),
    "gofakes3": {"read with another etag"},
    "azurite": {"list after d/f1"},
    "s3rver": {
        "create again", "stale update", "update of missing", "read with another etag", "range 0-1", "delete many",
        "list", "list after d/f1",
    },
}  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class of its error."""
    try:
        return call()
    except (BaseError, OSError) as error:
        return type(error).__name__


def paths(entries: Any) -> list[str]:
    return [entry["path"] for entry in entries]


def outcomes(access: Access) -> Iterator[tuple[str, Any]]:
    """Yield the name and the outcome of each call of a fixed sequence."""
    store: Any = access.store(retry_config={"max_retries": 0})

    def put(key: str, data: bytes, **how: Any) -> Any:
        return outcome(lambda: bool(obstore.put(store, key, data, **how)["e_tag"]))

    def get(key: str, **options: Any) -> Any:
        return outcome(lambda: bytes(obstore.get(store, key, options=cast(Any, options)).bytes()))

    def get_range(start: int, end: int) -> Any:
        return outcome(lambda: bytes(obstore.get_range(store, "a/ü x%.txt", start=start, end=end)))

    yield "create", put("a/ü x%.txt", b"0123456789", mode="create", attributes={"owner": "me"})
    yield "create again", put("a/ü x%.txt", b"0123456789", mode="create")
    first = {"e_tag": obstore.head(store, "a/ü x%.txt")["e_tag"]}
    yield "update", put("a/ü x%.txt", b"abcdefghij", mode=first)
    yield "stale update", put("a/ü x%.txt", b"abcdefghij", mode=first)
    yield "update of missing", put("missing", b"1", mode=first)
    etag = obstore.head(store, "a/ü x%.txt")["e_tag"]
    yield "read", get("a/ü x%.txt")
    yield "read again", get("a/ü x%.txt", if_none_match=etag)
    yield "read with etag", get("a/ü x%.txt", if_match=etag)
    yield "read with another etag", get("a/ü x%.txt", if_match=first["e_tag"])
    yield "read missing", get("gone")
    for start, end in ((0, 1), (5, 10), (5, 20), (10, 11)):
        yield f"range {start}-{end}", get_range(start, end)
    put("owned", b"", attributes={"owner": "me"})
    yield "empty", (get("owned"), obstore.get(store, "owned").attributes.get("owner"))
    with obstore.open_writer(store, "large", buffer_size=5 * 2**20) as writer:
        writer.write(DATA)
    yield "multipart", get("large") == DATA
    for key in ("d/e/x", "d/e/y", "d/f1", "d/f2", "d/f-3"):
        put(key, b"x")
    yield "list", paths(obstore.list(store).collect())
    yield "list after d/f1", paths(obstore.list(store, offset="d/f1").collect())
    listed = obstore.list_with_delimiter(store, "d")
    yield "list d", (listed["common_prefixes"], paths(listed["objects"]))
    yield "copy", (outcome(lambda: obstore.copy(store, "d/f1", "copied")), get("copied"))
    yield "delete missing", outcome(lambda: obstore.delete(store, "gone"))
    yield "delete many", outcome(lambda: obstore.delete(store, ["d/e/x", "d/e/y", "d/f1", "large"]))
    yield "list at the end", paths(obstore.list(store, "d").collect())


@pytest.mark.parametrize("name", SERVERS)
def test_stand_in_answers_as_real_servers_do(name: str) -> None:
    kind = SERVERS[name]
    if (why_not := kind.install()) is not None:
        pytest.skip(f"{name}: {why_not}")
    with kind() as real, StandIn(kind.dialect) as stand_in:
        expected, found = dict(outcomes(real.access)), dict(outcomes(stand_in.access))
    assert {call for call in expected if found[call] != expected[call]} == KNOWN[name]
