"""`ObjectBackend` on the stand-in, in each dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.object_contract import ObjectContract
from tests.support.objects.stand_in import StandIn


@pytest.fixture(scope="module", params=["s3", "gcs", "azure"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with StandIn(request.param) as started:
        yield started


class TestObjectBackend(ObjectContract):
    """On each server."""

    @pytest.fixture
    def url(self, server: Any, request: pytest.FixtureRequest) -> Iterator[str]:
        with server.named():
            yield str(server.url(f"t{abs(hash(request.node.name))}"))
