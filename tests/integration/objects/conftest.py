"""Stand-ins that the environment names, so that URLs reach them without any setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.objects.stand_in import StandIn


@pytest.fixture(scope="package", autouse=True)
def late_requests_stay_here() -> Iterator[None]:
    """Serve the threads that outlive their test, such as a release of a lock: they must not leave this machine."""
    with (
        StandIn("s3") as s3,
        StandIn("gcs") as gcs,
        StandIn("azure") as azure,
        s3.named(),
        gcs.named(),
        azure.named(),
    ):
        yield


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    """Yield a server of S3, or of the dialect that the test is parametrised with."""
    with StandIn(getattr(request, "param", "s3")) as server, server.named():
        yield server


@pytest.fixture(scope="module")
def shared_cloud() -> Iterator[StandIn]:
    """Yield one server of S3 for all tests of a module."""
    with StandIn() as server, server.named():
        yield server
