"""A fast tier in front of an object store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs import fast
from tests.support.jobs.job import running
from tests.support.objects.stand_in import StandIn

BASE = np.random.default_rng(1).integers(0, 1 << 32, 3 << 20, np.uint32)  # 12 MiB: an upload in parts


def state_of(step: int) -> dict[str, Any]:
    return {"base": BASE, "w": np.full(100, step)}


def is_right(state: dict[str, Any], step: int) -> bool:
    return all(np.array_equal(state[name], value) for name, value in state_of(step).items())


@pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)
def test_steps_reach_the_bucket_and_share_what_has_not_changed(cloud: StandIn, tmp_path: Path) -> None:
    run, tier = cloud.url("run"), jct.FastTierSettings(directory=str(tmp_path / "fast"), interval_steps=1)
    options: dict[str, Any] = {"fast_tier": tier, "frozen": "base", "save_decision_policy": jct.FixedIntervalPolicy(2)}
    with jct.StepManager(run, **options) as manager:
        for step in range(1, 8):
            assert manager.save(step, {"state": state_of(step)}).saved
            manager.wait()
        assert manager.fast_steps == [6, 7]
    assert [request.kind for request in cloud.requests].count("copy") == 2
    with jct.StepManager(run, **options) as manager:
        assert is_right(manager.restore({"state": state_of(0)})["state"], 7)
        assert manager.save(8, {"state": state_of(8)}).saved
    shutil.rmtree(tmp_path / "fast")
    with jct.StepManager(run, **options) as manager:
        assert is_right(manager.restore({"state": state_of(0)})["state"], 8)
        assert manager.steps == [2, 4, 6, 8]
        for step in manager.steps:
            assert jct.verify(manager.path(step)).ok
            assert is_right(manager.load({"state": state_of(0)}, step)["state"], step)


def test_job_continues_from_its_hosts_and_from_the_bucket(shared_cloud: StandIn, tmp_path: Path) -> None:
    places = shared_cloud.url("job"), str(tmp_path / "fast")
    with running(3) as job:
        job.call(fast.save_steps, *places, [9, 10, 11])
        shutil.rmtree(tmp_path / "fast" / "host1")
        assert job.call(fast.restore, *places) == [[11, []]] * 3
        shutil.rmtree(tmp_path / "fast")
        assert job.call(fast.restore, *places) == [[10, []]] * 3
