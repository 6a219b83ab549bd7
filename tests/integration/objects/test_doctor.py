"""`jaxckpt doctor` at a URL: what is permitted, how fast it is, and what the clock of the storage shows."""

from __future__ import annotations

import datetime
import errno
from typing import Any

import pytest

from jaxckpt_train.inspection import object_trials
from jaxckpt_train.inspection.object_trials import try_objects
from jaxckpt_train.settings import MIB, ObjectStoreSettings, StoreSettings
from jaxckpt_train.store.backends.by_path import backend_for
from tests.support.commands import json_of, printed
from tests.support.objects.faults import Action, Fail, Kind, Request, Silent
from tests.support.objects.stand_in import StandIn
from tests.support.runs import made_run

WORKS = {"list": None, "put": None, "get": None, "conditional puts": None, "delete": None}
SMALL = ("--size-mib", 1)


class Forbid:
    """Refuse the credentials for all requests of some kinds."""

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = kinds

    def decide(self, request: Request) -> Action | None:
        return Fail(403) if request.kind in self._kinds else None


class Slow:
    """A clock that is late by some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return datetime.datetime.now(datetime.UTC).timestamp() - self._seconds

    def perf_counter(self) -> float:
        return datetime.datetime.now(datetime.UTC).timestamp()


@pytest.fixture
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a backend with limits for tests, which the command uses, too."""
    limits = ObjectStoreSettings(connect_timeout_s=1, request_timeout_s=0.5, retries=0, retry_timeout_s=1)
    backend = backend_for(StoreSettings(object_store=limits))
    monkeypatch.setattr(object_trials, "SETTINGS", StoreSettings(object_store=limits))
    return backend


@pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)
def test_run_at_url_is_examined_and_nothing_left(cloud: StandIn) -> None:
    url = cloud.url("runs/a")
    made_run(url, 1, 2)
    before = set(cloud.objects.content)
    found = json_of("doctor", url, *SMALL)
    assert found["store"]["operations"] == WORKS
    assert 0 < found["store"]["bytes"] <= MIB
    rates = ("put_s", "get_s", "write_bytes_per_s", "read_bytes_per_s")
    assert min(found["store"][name] for name in rates) > 0
    assert found["store"]["clock_s"] == 0
    assert (found["run"]["steps"], found["run"]["newest_step"], found["owner"]) == (2, 2, None)
    assert found["warnings"] == []
    assert len(found["advice"]) == 1
    assert found["versions"]["obstore"]
    assert set(cloud.objects.content) == before


def test_url_without_run_is_tested(cloud: StandIn) -> None:
    text = printed("doctor", cloud.url("new"), "--size-mib", 0)
    assert "permitted: list, put, get, conditional puts, delete\n" in text
    assert "AbortIncompleteMultipartUpload" in text
    assert "latency" not in text
    assert cloud.objects.content == {}


def test_missing_permissions_are_named(cloud: StandIn, quick_backend: Any) -> None:
    made_run(cloud.url("run"), 1)
    cloud.faults = Forbid("put", "put_create", "put_update")
    found = json_of("doctor", cloud.url("run"), *SMALL, code=1)
    assert found["store"]["operations"].keys() == {"list", "put"}
    assert "the credentials were refused" in found["store"]["operations"]["put"]
    assert found["run"]["steps"] == 1
    cloud.faults = Forbid("list")
    found = json_of("doctor", cloud.url("run"), *SMALL, code=1)
    assert "the credentials were refused" in found["store"]["operations"]["list"]
    assert found["store"]["operations"]["put"] is None
    cloud.faults = Forbid("delete", "delete_many")
    found = json_of("doctor", cloud.url("run"), *SMALL, code=1)
    assert [name for name, problem in found["store"]["operations"].items() if problem] == ["delete"]


def test_silent_endpoint_ends_the_test(cloud: StandIn, quick_backend: Any) -> None:
    cloud.faults = Silent()
    found = json_of("doctor", cloud.url("run"), code=1)
    assert found["store"]["operations"].keys() == {"list", "put"}
    assert f"[Errno {errno.ETIMEDOUT}]" in found["warnings"][0]


def test_other_clock_is_measured(cloud: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_trials, "time", Slow(1000))
    found = json_of("doctor", cloud.url("run"), *SMALL, code=1)
    assert abs(found["store"]["clock_s"] - 1000) < 10
    assert "the clock of the storage differs" in found["warnings"][0]


def test_data_of_deleted_steps_is_no_warning(cloud: StandIn) -> None:
    made_run(cloud.url("run"), 1, 2)
    printed("prune", cloud.url("run"), "--keep-latest", 1, "--yes")
    assert "the data of 1 deleted or unfinished step is still there" in printed("doctor", cloud.url("run"), *SMALL)


def test_slow_endpoint_gets_few_bytes(cloud: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_trials, "TRIAL_S", 0.0)
    trial = try_objects(backend_for(StoreSettings()), cloud.url("run"), 64 * MIB)
    assert trial.bytes == object_trials.FIRST_BYTES
