"""Unchanged leaves on an object store, which copies their objects itself."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.objects.faults import Fail, Faults, Request
from tests.support.objects.runs import Held
from tests.support.objects.stand_in import StandIn

WIDTH = 3 << 20  # float32, 12 MiB: an upload in parts
all_dialects = pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)


def state_of(base: jax.Array, step: int) -> dict[str, jax.Array]:
    return {"base": base, "w": jnp.full(100, step)}


def save_steps(url: str, steps: int) -> jct.StepManager:
    base = jnp.arange(WIDTH, dtype=jnp.float32)
    with jct.StepManager(url, frozen="base") as manager:
        for step in range(1, steps + 1):
            manager.save(step, {"state": state_of(base, step)})
            manager.wait()
    return manager


def check(url: str, steps: int) -> None:
    reader = jct.StepManager(url)
    for step in range(1, steps + 1):
        assert jct.verify(reader.path(step)).ok
        found = reader.load({"state": None}, step)["state"]
        assert np.asarray(found["base"]).tobytes() == np.arange(WIDTH, dtype=np.float32).tobytes()
        assert found["w"][0] == step


@all_dialects
def test_service_copies_unchanged_objects(cloud: StandIn) -> None:
    save_steps(cloud.url("run"), 3)
    kinds = [request.kind for request in cloud.requests]
    assert kinds.count("copy") == 2
    check(cloud.url("run"), 3)


class NoCopies(Faults):
    """Refuse all copies."""

    def decide(self, request: Request) -> Fail | None:
        return Fail(403) if request.kind == "copy" else None


def test_what_cannot_be_copied_is_written(cloud: StandIn) -> None:
    cloud.faults = NoCopies()
    save_steps(cloud.url("run"), 2)
    check(cloud.url("run"), 2)


def test_copy_that_arrives_late_replaces_nothing(cloud: StandIn) -> None:
    save_steps(cloud.url("run"), 1)
    held = cloud.faults = Held(lambda request: request.kind == "copy")
    settings = jct.StoreSettings(object_store=jct.ObjectStoreSettings(request_timeout_s=0.5, retries=0))
    with jct.StepManager(cloud.url("run"), frozen="*", settings=settings) as manager:
        base = manager.restore({"state": None})["state"]["base"]
        manager.save(2, {"state": state_of(base, 1)})  # two copies, of which the second arrives first
        manager.wait()
    before = dict(cloud.objects.content)
    held.release.set()
    deadline = time.monotonic() + 10
    while cloud.objects.content == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cloud.objects.content != before
    assert jct.verify(manager.path(2)).ok


def test_deleted_step_harms_no_other(cloud: StandIn) -> None:
    save_steps(cloud.url("run"), 2)
    first = jct.StepManager(cloud.url("run")).path(1).rpartition("/")[2]
    for name in [name for name in cloud.objects.content if first in name]:
        cloud.objects.delete(name)
    found = jct.StepManager(cloud.url("run")).restore()["state"]
    assert np.asarray(found["base"]).tobytes() == np.arange(WIDTH, dtype=np.float32).tobytes()
