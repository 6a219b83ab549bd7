"""Real object servers: they start, serve obstore, and hold the conditions of writes, all but s3rver."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import from_url

from tests.support.objects.servers import SERVERS, RealServer, started_or_skipped


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    with started_or_skipped(request.param) as server:
        yield server


def test_conditions_of_writes_hold_except_on_s3rver(server: RealServer) -> None:
    store: Any = server.access.store()

    def create(number: int) -> bool:
        try:
            obstore.put(store, "raced", str(number).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    def update(version: Any) -> bool:
        try:
            obstore.put(store, "raced", b"new", mode={"e_tag": version["e_tag"]})
        except PreconditionError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(16)))
    version = obstore.head(store, "raced")
    updated = [update(version), update(version)]
    if server.name == "s3rver":
        assert all(created)
        assert all(updated)
    else:
        assert created.count(True) == 1
        assert updated == [True, False]


def test_serves_ranges_listings_uploads_and_deletions(server: RealServer) -> None:
    with server.named():
        store: Any = from_url(server.url())
    data = os.urandom(11 * 2**20)
    with obstore.open_writer(store, "d/large", buffer_size=5 * 2**20) as writer:
        writer.write(data)
    assert bytes(obstore.get_range(store, "d/large", start=5_000_000, end=6_000_000)) == data[5_000_000:6_000_000]
    obstore.put(store, "d/e/small", b"x")
    listed = obstore.list_with_delimiter(store, "d")
    assert listed["common_prefixes"] == ["d/e"]
    assert [meta["path"] for meta in listed["objects"]] == ["d/large"]
    obstore.delete(store, ["d/large", "d/e/small"])
    assert obstore.list(store).collect() == []
