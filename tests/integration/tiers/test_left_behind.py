"""Steps of the fast tier that are not on the branch of the last save: of a roll-back, other hosts, or another job."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import HoldingBackend


def on_host(tmp_path: Path, host: str, keep: int = 50, backend: LocalBackend | None = None) -> jct.StepManager:
    tier = jct.FastTierSettings(directory=tmp_path / host, interval_steps=1, keep=keep)
    policy = jct.FixedIntervalPolicy(10)
    return jct.StepManager(tmp_path / "slow", fast_tier=tier, save_decision_policy=policy, backend=backend)


def test_steps_that_another_host_did_not_see_are_older(tmp_path: Path) -> None:
    with on_host(tmp_path, "a") as manager:
        for step in range(10, 20):
            assert manager.save(step, {"x": np.full(10, step)})
    with on_host(tmp_path, "b") as manager:
        manager.restore()
        assert manager.restored_step == 10
        for step in (20, 30):
            assert manager.save(step, {"x": np.full(10, -step)})
    with on_host(tmp_path, "a") as manager:
        assert manager.restore()["x"][0] == -30
        assert manager.save(31, {"x": np.full(10, -31)})


def test_host_that_returns_with_later_steps_of_an_older_job_refuses_no_saves(tmp_path: Path) -> None:
    with on_host(tmp_path, "a", keep=2) as manager:
        for step in range(10, 14):
            assert manager.save(step, {"x": np.full(10, step)})
            manager.wait()  # a step stays while it is copied
    with on_host(tmp_path, "b") as manager:
        manager.restore()
        assert manager.save(11, {"x": np.full(10, -11)}, force=True)  # to both tiers
    with on_host(tmp_path, "a", keep=2) as manager:
        manager.own()
        assert manager.restore()["x"][0] == -11
        assert manager.fast_steps == []
        for step in (12, 13):
            assert manager.save(step, {"x": np.full(10, -step)})
        manager.wait()
        assert manager.fast_steps == [12, 13]
    found = [jct.load(each)[0] for each in sorted((tmp_path / "a").glob("run-*/step-*"))]
    assert found == [-12, -13]  # nothing of the older job is left
    with on_host(tmp_path, "a", keep=2) as manager:
        assert manager.restore()["x"][0] == -13


def test_steps_of_a_job_without_a_fast_tier_are_newer(tmp_path: Path) -> None:
    with on_host(tmp_path, "a", keep=2) as manager:
        for step in range(10, 14):
            assert manager.save(step, {"x": np.full(10, step)})
            manager.wait()  # a step stays while it is copied
    with jct.StepManager(tmp_path / "slow") as manager:
        assert manager.restore()["x"][0] == 10
        for step in (11, 15):
            assert manager.save(step, {"x": np.full(10, -step)})
    with on_host(tmp_path, "a", keep=2) as manager:
        assert manager.restore()["x"][0] == -15
        assert manager.save(16, {"x": np.full(10, -16)})
        manager.wait()
        assert manager.fast_steps == [16]
    with on_host(tmp_path, "a", keep=2) as manager:
        assert manager.restore()["x"][0] == -16


def test_reader_does_not_leave_fast_steps_of_another_job_behind(tmp_path: Path) -> None:
    with on_host(tmp_path, "a") as manager:
        assert manager.save(10, {"x": np.full(10, 10)})
    with on_host(tmp_path, "a") as reader:
        assert reader.restore()["x"][0] == 10
        with on_host(tmp_path, "a") as manager:
            manager.restore()
            for step in (11, 12):
                assert manager.save(step, {"x": np.full(10, step)})
        with pytest.raises(jct.CheckpointExistsError, match="saved 11, 12"):
            reader.save(13, {"x": np.full(10, -13)})
        assert reader.restore()["x"][0] == 12
        for step in (13, 14):
            assert reader.save(step, {"x": np.full(10, step)})


def test_reader_continues_from_a_step_that_another_job_copies_meanwhile(tmp_path: Path) -> None:
    with on_host(tmp_path, "a") as manager:
        for step in (10, 11):
            assert manager.save(step, {"x": np.full(10, step)})
    with on_host(tmp_path, "a") as reader:
        assert reader.restore()["x"][0] == 11
        with on_host(tmp_path, "a") as manager:
            manager.own()
            manager.drain_newest()
            manager.wait()
            assert manager.steps == [10, 11]
        assert reader.save(12, {"x": np.full(10, 12)})
    with on_host(tmp_path, "a") as manager:
        assert manager.restore()["x"][0] == 12
        assert manager.fast_steps == [10, 11, 12]


def test_roll_back_leaves_fast_steps_behind(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", interval_steps=1, keep=10)

    def manager_of() -> jct.StepManager:
        return jct.StepManager(tmp_path / "slow", fast_tier=tier, save_decision_policy=jct.FixedIntervalPolicy(10))

    with manager_of() as manager:
        for step in (10, 11, 12, 13):
            assert manager.save(step, {"x": np.full(10, step)})
    with manager_of() as manager:
        assert manager.restore(step=11)["x"][0] == 11
        assert manager.save(12, {"x": np.full(10, 120)})
    with manager_of() as manager:
        assert manager.restore()["x"][0] == 120
        assert manager.fast_steps == [10, 11, 12]
    with manager_of() as manager:
        assert manager.restore(step=13)["x"][0] == 13  # still there, if asked for


@pytest.mark.parametrize("is_lost", [False, True])
def test_lost_step_after_a_roll_back_still_leaves_the_others_behind(tmp_path: Path, is_lost: bool) -> None:
    with on_host(tmp_path, "a") as manager:
        for step in (10, 11, 12, 13):
            assert manager.save(step, {"x": np.full(10, step)})
    with on_host(tmp_path, "a") as manager:
        manager.restore(step=10, roll_back=True)
        assert manager.save(12, {"x": np.full(10, -12)})
        manager.wait()
        (name,) = [entry.name for entry in manager._run.fast_line() if entry.step == 12]
    for file in (tmp_path / "a").rglob(f"{name}/**/*.safetensors"):
        if is_lost:
            file.unlink()
        else:
            file.write_bytes(bytes(file.stat().st_size))
    for owns_first in (False, True):
        with on_host(tmp_path, "a") as manager:
            if owns_first:
                manager.own()
            assert manager.restore()["x"][0] == 10
    with on_host(tmp_path, "a") as manager:
        manager.restore()
        assert manager.save(11, {"x": np.full(10, -11)})
        manager.wait()
        assert [manager.latest, manager.fast_steps] == [11, [10, 11]]


def test_roll_back_outlives_the_branch_after_it(tmp_path: Path) -> None:
    with on_host(tmp_path, "a") as manager:
        for step in (10, 11, 20, 21):
            assert manager.save(step, {"x": np.full(10, step)})
    with on_host(tmp_path, "a") as manager:
        manager.restore(step=10, roll_back=True)
        for step in (11, 12):
            assert manager.save(step, {"x": np.full(10, -step)})
    shutil.rmtree(tmp_path / "a")
    with on_host(tmp_path, "a") as manager:
        manager.own()
        assert manager.restore()["x"][0] == 10
    with jct.StepManager(tmp_path / "slow") as manager:
        assert manager.restore()["x"][0] == 10


def test_copy_of_a_step_that_is_left_behind_meanwhile_is_left_behind(tmp_path: Path) -> None:
    backend = HoldingBackend("rename", "slow/step-0000000020")
    with on_host(tmp_path, "a", keep=2, backend=backend) as manager:
        for step in (10, 11, 20):
            assert manager.save(step, {"x": np.full(10, step)})
        assert backend.reached.wait(60)
        assert manager.save(11, {"x": np.full(10, -11)}, overwrite=True, fast_only=True)
        assert manager.settle(waits_for_copies=False) is None
        backend.go.set()
        manager.wait()
        assert not manager.is_committed(20)
    for step in (tmp_path / "a").glob("run-*/step-0000000020*"):
        shutil.rmtree(step)
    with jct.StepManager(tmp_path / "slow") as manager:
        assert manager.restore()["x"][0] == 10
    with on_host(tmp_path, "a", keep=2) as manager:
        assert manager.restore()["x"][0] == -11
        assert manager.save(20, {"x": np.full(10, -20)})
    with jct.StepManager(tmp_path / "slow") as manager:
        assert manager.restore()["x"][0] == -20
