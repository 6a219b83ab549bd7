"""How many requests saves and loads on an object store take."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.settings import MIB, ObjectStoreSettings
from jaxckpt_train.store.backends.base import Divided
from jaxckpt_train.store.backends.objects import FIRST_BYTES, ObjectBackend
from tests.support.objects.faults import Action, CutBody, Request
from tests.support.objects.object_map import BUCKET
from tests.support.objects.stand_in import StandIn

STATE = {f"a{number:04}": np.full(500, number, np.float32) for number in range(1000)}


def kinds(server: StandIn) -> list[str]:
    return [request.kind for request in server.requests]


def test_thousand_small_arrays_take_few_requests(cloud: StandIn) -> None:
    jct.save(cloud.url("c"), STATE)
    assert len(cloud.requests) <= 12
    cloud.requests.clear()
    jct.save(cloud.url("c"), STATE, overwrite=True)
    assert len(cloud.requests) <= 12
    cloud.requests.clear()
    loaded = jct.load(cloud.url("c"))
    assert kinds(cloud) == ["get"] * 4
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in STATE.items())


def test_small_object_takes_one_request_to_load(cloud: StandIn) -> None:
    jct.save(cloud.url("c"), {"a": np.arange(10)})
    cloud.requests.clear()
    jct.load(cloud.url("c"))
    assert kinds(cloud) == ["get"] * 3  # COMMIT, manifest, segment


def test_save_in_background_leaves_all_requests_to_it(cloud: StandIn) -> None:
    jct.save(cloud.url("c"), {"a": np.arange(10)})
    pending = jct.save_async(cloud.url("c"), {"a": np.arange(10)})
    with pytest.raises(jct.CheckpointExistsError):
        pending.wait()


def test_long_read_is_divided_without_reading_a_byte_twice(cloud: StandIn) -> None:
    settings, size = ObjectStoreSettings(part_bytes=5 * MIB), 12 * MIB + 5
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    cloud.objects.put(f"{BUCKET}/c/large", content.tobytes())
    found = np.zeros(size, np.uint8)
    with contextlib.closing(ObjectBackend(settings).open(cloud.url("c"), "large", direct="auto")) as source:
        source.read_into(0, found, size)
        assert isinstance(source, Divided)
        assert source.piece_bytes % settings.part_bytes == 0
    ranges = sorted([int(end) for end in str(request.range)[6:].split("-")] for request in cloud.requests)
    assert ranges[0] == [0, FIRST_BYTES - 1]
    assert all(first[1] + 1 == second[0] for first, second in pairwise(ranges))
    assert found.tobytes() == content.tobytes()


class CutsOneListing:
    """Cuts the answer to the first listing."""

    def __init__(self) -> None:
        self.left = [CutBody(20)]

    def decide(self, request: Request) -> Action | None:
        return self.left.pop() if request.kind == "list" and self.left else None


def test_listing_that_breaks_off_is_repeated(cloud: StandIn) -> None:
    jct.save(cloud.url("c"), {"a": 1})
    cloud.faults = faults = CutsOneListing()
    jct.save(cloud.url("c"), {"a": 2}, overwrite=True)
    assert not faults.left
    assert jct.load(cloud.url("c")) == {"a": 2}
