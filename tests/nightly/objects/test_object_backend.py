"""`ObjectBackend` on real servers, and the probe of their conditions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import ObjectStoreSettings
from jaxckpt_train.store.backends.objects import ObjectBackend
from tests.support.object_contract import ObjectContract
from tests.support.objects.servers import RealServer, S3rver, started_or_skipped


@pytest.fixture(scope="module", params=["moto", "versitygw", "azurite", "gofakes3"])
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    with started_or_skipped(request.param) as started:
        yield started


class TestObjectBackend(ObjectContract):
    """On each server."""

    @pytest.fixture
    def url(self, server: RealServer, request: pytest.FixtureRequest) -> Iterator[str]:
        with server.named():
            yield server.url(f"t{abs(hash(request.node.name))}")


def test_probe_refuses_s3rver() -> None:
    if (why_not := S3rver.install()) is not None:
        pytest.skip(f"s3rver: {why_not}")
    with S3rver() as server, server.named(), pytest.raises(StorageError, match="If-None-Match"):
        ObjectBackend(ObjectStoreSettings()).probe(server.url("run"))
