"""A stand-in that the environment names, so that URLs reach it without any setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.objects.stand_in import StandIn


@pytest.fixture
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Yield a server of S3, or of the dialect that the test is parametrised with."""
    with StandIn(getattr(request, "param", "s3")) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
