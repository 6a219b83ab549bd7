"""How clients of object stores are made: from the environment alone, and with settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.settings import ObjectStoreSettings
from tests.support.objects.access import Dialect
from tests.support.objects.faults import Silent
from tests.support.objects.stand_in import StandIn


@pytest.fixture
def stand_in(dialect: Dialect) -> Iterator[StandIn]:
    """A server that the variables of the environment name."""
    with StandIn(dialect) as server, server.named():
        yield server


@pytest.mark.parametrize("dialect", ["s3", "gcs", "azure"])
@pytest.mark.parametrize("allowed", [True, False])
def test_environment_alone_names_the_endpoint(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    if not allowed:  # the endpoint is a URL with http
        for name in stand_in.environment():
            if name.endswith("ALLOW_HTTP"):
                monkeypatch.delenv(name)
    jct.save(stand_in.url("a"), {"w": np.arange(3)})
    assert jct.load(stand_in.url("a"))["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dialect", ["s3"])
def test_silent_endpoint_is_an_error_after_the_time_limit(stand_in: StandIn) -> None:
    stand_in.faults = Silent()
    settings = jct.StoreSettings(object_store=ObjectStoreSettings(request_timeout_s=0.2, retries=0))
    with pytest.raises(jct.StorageError, match="error sending request"):
        jct.save(stand_in.url("a"), {"w": np.arange(3)}, settings=settings)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    settings = jct.StoreSettings(object_store=ObjectStoreSettings(region=f"region-without-obstore-{url[:2]}"))
    for name in [each for each in sys.modules if each.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)  # an import of it fails
    for act in (
        lambda: jct.save(url, {"w": np.arange(3)}, settings=settings),
        lambda: jct.load(url, settings=settings),
        lambda: jct.verify(url, settings=settings),
        lambda: jct.StepManager(url, settings=settings).restore(),
        lambda: jct.CheckpointCallback(url, store=settings).resume({"w": 1}),
    ):
        with pytest.raises(jct.SettingsError, match=r"pip install 'jaxckpt-train\[objects\]'"):
            act()
