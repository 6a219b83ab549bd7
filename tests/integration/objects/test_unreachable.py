"""An endpoint that does not answer is not taken for damage, and a missing bucket not for an empty one."""

from __future__ import annotations

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.commands import run
from tests.support.objects.faults import Action, Fail, Faults, Request
from tests.support.objects.stand_in import StandIn


class FailingReads(Faults):
    """Refuse to read the objects of one step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, request: Request) -> Action | None:
        return Fail(500) if request.kind == "get" and self.name in request.key else None


def test_restore_does_not_go_back_because_of_the_network(cloud: StandIn) -> None:
    settings = jct.StoreSettings(object_store=jct.settings.ObjectStoreSettings(retries=0))
    with jct.StepManager(cloud.url("run"), settings=settings) as manager:
        for step in (1, 2):
            manager.save(step, {"state": {"w": np.full(100, step)}})
        manager.wait()
        newest = manager.path(2).rpartition("/")[2]
        cloud.faults = FailingReads(newest)
        with pytest.raises(jct.StorageError, match=newest):
            manager.restore()
        cloud.faults = None
        assert manager.restore()["state"]["w"][0] == 2
        assert manager.steps == [1, 2]
        assert not manager.damaged


@pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)
def test_missing_bucket_is_named(cloud: StandIn) -> None:
    url = cloud.url("run").replace("bucket", "missing")
    manager = jct.StepManager(url)
    for act in (lambda: jct.save(url, {"w": 1}), lambda: jct.load(url), manager.own):
        with pytest.raises(jct.StorageError, match=f"no bucket {url.removesuffix('/run')}:"):
            act()
    manager.close()
    assert run("doctor", url, "--size-mib", 0).output.count("there is no bucket") == 2  # its listing and its put


def test_endpoint_without_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(jct.SettingsError, match="AWS_ENDPOINT_URL"):
        jct.load("s3://bucket/a")
