"""An endpoint that ignores the conditions of puts is refused before the first save."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.settings import ObjectStoreSettings
from jaxckpt_train.store.backends import objects
from tests.support.objects.calls import Answer
from tests.support.objects.stand_in import StandIn

STATE = {"w": np.arange(100.0)}


class Careless(StandIn):
    """A stand-in that ignores all conditions."""

    def respond(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[Answer, int] | None:
        kept = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        return super().respond(method, target, kept, body)


@pytest.fixture(autouse=True)
def forgotten_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test may have probed a server at the same port."""
    monkeypatch.setattr(objects._clients, "probed", [])


@pytest.fixture
def careless() -> Iterator[StandIn]:
    with Careless() as server, server.named():
        yield server


def save_single(url: str, settings: jct.StoreSettings) -> None:
    jct.save(url, STATE, settings=settings)


def save_step(url: str, settings: jct.StoreSettings) -> None:
    with jct.StepManager(url, settings=settings) as manager:
        manager.save(1, {"state": STATE})
        manager.wait()


both = pytest.mark.parametrize("save", [save_single, save_step])


@both
def test_endpoint_that_ignores_conditions_is_refused(
    careless: StandIn, save: Callable[[str, jct.StoreSettings], None]
) -> None:
    with pytest.raises(jct.StorageError, match="check_conditions"):
        save(careless.url("x"), jct.StoreSettings())
    assert not careless.objects.content


@both
def test_refusal_can_be_overridden(careless: StandIn, save: Callable[[str, jct.StoreSettings], None]) -> None:
    save(careless.url("x"), jct.StoreSettings(object_store=ObjectStoreSettings(check_conditions=False)))
    assert any(name.endswith("COMMIT") for name in careless.objects.content)


def test_endpoint_is_probed_once(cloud: StandIn) -> None:
    save_single(cloud.url("one"), jct.StoreSettings())
    assert any(".jaxckpt-now-" in request.key for request in cloud.requests)
    cloud.requests.clear()
    save_single(cloud.url("two"), jct.StoreSettings())
    save_step(cloud.url("run"), jct.StoreSettings())
    assert not any(".jaxckpt-now-" in request.key for request in cloud.requests)


def test_each_endpoint_of_the_environment_is_probed(careless: StandIn) -> None:
    with StandIn() as sound, sound.named():
        jct.save(sound.url("x"), STATE)
    with pytest.raises(jct.StorageError, match="check_conditions"):
        jct.save(careless.url("x"), STATE)
