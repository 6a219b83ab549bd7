"""A short campaign over a bad network, and an endpoint that does not answer."""

from __future__ import annotations

import time

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.nightly.objects import networks
from tests.support.objects.faults import Silent
from tests.support.objects.servers import VersityGw
from tests.support.objects.stand_in import StandIn

STATE = {"a": np.arange(1000.0)}


def test_small_states_survive_random_faults() -> None:
    assert networks.small_trips(50) == {"saved": 50, "loaded": 50}


def test_large_state_survives_failures_cuts_and_stall() -> None:
    if (why_not := VersityGw.install()) is not None:
        pytest.skip(f"versitygw: {why_not}")
    networks.large_trips(64)  # raises if other bytes were loaded


def test_silent_endpoint_ends_in_bounded_time() -> None:
    chosen = networks.settings(request_timeout_s=0.5, retries=2, retry_timeout_s=2.0)
    with StandIn("s3") as server, server.named():
        jct.save(server.url("c"), STATE)
        server.faults = Silent()
        start = time.monotonic()
        with pytest.raises(jct.StorageError):
            jct.save(server.url("d"), STATE, settings=chosen)
        with pytest.raises(jct.StorageError):
            jct.load(server.url("c"), settings=chosen)
        assert time.monotonic() - start < 60
