"""Runs of jobs: all processes take the same actions, also if something differs in one of them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.jobs.arrays import global_array
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.small_runs import QUICK, RESTORED, SAVED, is_first, outcome, save, save_steps, state_of


def look_in_one_process(directory: str) -> str:
    save_steps(directory, [1])
    if is_first():
        assert jct.StepManager(directory).latest == 1
    manager = jct.StepManager(directory, settings=QUICK)
    return outcome(lambda: manager.restore({"state": state_of(0)}) and "restored")


def test_manager_made_by_one_process_blocks_nobody(tmp_path: Path) -> None:
    with running(2) as job:
        assert job.call(look_in_one_process, str(tmp_path / "run")) == [RESTORED] * 2


def ask_then_save(directory: str) -> int:
    saved = 0
    with jct.StepManager(directory, save_decision_policy=jct.EverySecondsPolicy(1)) as manager:
        for step in range(1, 800):
            if manager.should_save(step):
                saved += manager.save(step, {"state": state_of(step)}).saved
            time.sleep(0.01)  # what a step of the training takes
    return saved


def test_save_follows_the_earlier_should_save(tmp_path: Path) -> None:
    with running(2) as job:
        answers = job.call(ask_then_save, str(tmp_path / "run"))
    assert answers[0] == answers[1] >= 2


def fall_back(directory: str) -> list[Any]:
    with jct.StepManager(directory) as manager:
        manager.own()
        manager.restore({"state": state_of(0)})
        return [manager.restored_step, manager.latest, manager.steps, manager.damaged]


def test_steps_are_equal_after_fallback_restore(tmp_path: Path, job_of: JobOf) -> None:
    run = tmp_path / "run"
    job_of(2, 1).call(save_steps, str(run), [1, 2, 3])
    os.truncate(next((run / "step-0000000003" / "state").glob("p00001-*.safetensors")), 100)
    assert job_of(2, 1).call(fall_back, str(run)) == [[2, 2, [1, 2], [3]]] * 2


def keep_one(directory: str) -> list[Any]:
    with jct.StepManager(directory, preservation_policy=jct.LatestN(1)) as manager:
        for step in (1, 2):
            manager.save(step, {"state": state_of(step)})
            manager.wait()
        return [manager.steps, outcome(lambda: manager.metadata(1).step)[:18], outcome(lambda: manager.path(1))[:18]]


def test_steps_are_equal_after_retention(tmp_path: Path, job_of: JobOf) -> None:
    answers = job_of(2, 1).call(keep_one, str(tmp_path / "run"))
    assert answers == [[[2], "StepNotFoundError:", "StepNotFoundError:"]] * 2


def follow_a_run(directory: str, place: str) -> list[Any]:
    """Follow a run in a job that only reads, such as an evaluation of another job's steps."""
    manager = jct.StepManager(directory)
    manager.restore({"w": None})
    first, end = manager.latest, time.monotonic() + 15
    Path(place, str(jax.process_index())).touch()
    while manager.latest == first and time.monotonic() < end:
        time.sleep(0.05)
    return [first, manager.latest]


def test_reading_job_sees_later_steps_of_another(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def save_another(manager: jct.StepManager) -> None:
        while len(list(tmp_path.glob("[01]"))) < 2:
            time.sleep(0.05)
        manager.save(2, {"w": np.arange(5)})
        manager.wait()

    with jct.StepManager(run) as manager, running(2) as job:
        manager.save(1, {"w": np.arange(5)})
        manager.wait()
        thread = threading.Thread(target=save_another, args=(manager,))
        thread.start()
        assert job.call(follow_a_run, str(run), str(tmp_path)) == [[1, 2], [1, 2]]
        thread.join()


def fail_in_one_then_go_on(directory: str, who: int) -> list[str]:
    manager = jct.StepManager(directory, settings=QUICK)
    metrics: Any = {"loss": object() if jax.process_index() == who else 1.0}
    found = [save(manager, 1, metrics=metrics)]
    found += [save(manager, step) for step in (2, 3, 4)]
    return [*found, outcome(manager.close)]


@pytest.mark.parametrize("who", [0, 1])
def test_later_steps_save_after_failure_of_one(tmp_path: Path, who: int) -> None:
    with running(2) as job:
        answers = job.call(fail_in_one_then_go_on, str(tmp_path / "run"), who)
    assert [answer[2:] for answer in answers] == [[SAVED, SAVED, "None"]] * 2


class FullDisk(LocalBackend):
    is_full = True

    def create(self, path: str, *, direct: Any) -> Any:
        if self.is_full and path.endswith(".safetensors"):
            raise jct.StorageError(28, "full", path)
        return super().create(path, direct=direct)


def wait_in_one_then_go_on(directory: str) -> list[str]:
    """`wait` may be called by any process alone."""
    backend = FullDisk()
    manager = jct.StepManager(directory, settings=QUICK, backend=backend)
    found = [save(manager, 1)]
    if is_first():
        assert outcome(manager.wait).startswith("StorageError")
    backend.is_full = False
    found += [save(manager, step) for step in (2, 3, 4)]
    return [*found, outcome(manager.close)]


def test_wait_error_in_one_keeps_processes_in_step(tmp_path: Path) -> None:
    with running(2) as job:
        answers = job.call(wait_in_one_then_go_on, str(tmp_path / "run"))
    assert [answer[2:] for answer in answers] == [[SAVED, SAVED, "None"]] * 2


class Picky:
    """An iterator whose own code fails in process 1."""

    def __init__(self) -> None:
        self.state = 0

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        if not is_first() and state == 2:
            raise ValueError("no")
        self.state = state


def restore_picky(directory: str) -> list[str]:
    picky = Picky()
    with jct.StepManager(directory) as manager:
        for step in (1, 2):
            picky.state = step
            manager.save(step, {"state": state_of(step), "picky": picky})
    manager = jct.StepManager(directory, settings=QUICK)
    target = {"state": state_of(0), "picky": Picky()}
    outcome(lambda: manager.restore(target))
    return [outcome(lambda: manager.restore(target, step=1) and "restored"), save(manager, 2), outcome(manager.close)]


def test_user_error_during_restore_keeps_processes_in_step(tmp_path: Path) -> None:
    with running(2) as job:
        assert job.call(restore_picky, str(tmp_path / "run")) == [[RESTORED, SAVED, "None"]] * 2


def metrics_of_one(directory: str) -> list[str]:
    manager = jct.StepManager(directory, settings=QUICK, save_decision_policy=jct.ImprovementPolicy("loss", "min"))
    manager.own()
    found = [save(manager, step, metrics={"loss": 10.0 - step} if is_first() else None) for step in (1, 2, 3)]
    return [*found, outcome(manager.close)]


def test_metrics_of_process_0_alone_are_enough(tmp_path: Path) -> None:
    with running(2) as job:
        assert job.call(metrics_of_one, str(tmp_path / "run")) == [[SAVED, SAVED, SAVED, "None"]] * 2


class SinceTheLast(jct.FixedIntervalPolicy):
    """A user's policy that subclasses a policy of the package."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return not previous_steps or step.step - previous_steps[-1].step >= self.interval


def save_by_subclass(directory: str) -> list[int]:
    with jct.StepManager(directory, save_decision_policy=SinceTheLast(4)) as manager:
        return [step for step in range(1, 13) if manager.save(step, {"state": state_of(step)}).saved]


def test_subclassed_policy_is_asked_in_a_job(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(2, 1).call(save_by_subclass, str(tmp_path / "run")) == [[1, 5, 9]] * 2


def reasons(directory: str) -> list[str]:
    policy = jct.AnySavePolicy([jct.FixedIntervalPolicy(3), jct.SpecificStepsPolicy([2])])
    with jct.StepManager(directory, save_decision_policy=policy) as manager:
        return [manager.decide(step).reason for step in (1, 2, 3)]


def test_save_reason_names_its_policy(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(2, 1).call(reasons, str(tmp_path / "run")) == [reasons(str(tmp_path / "alone"))] * 2


def spread() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((64, 16), np.float32, sharding=global_array([64, 16], [2], []).sharding)


def restore_with_another_target(directory: str) -> list[Any]:
    manager = jct.StepManager(directory, settings=jct.StoreSettings(barrier_timeout_s=16.0, read_once=True))
    target: Any = {"w": spread()}
    wrong, began = target if is_first() else jct.JsonValue(None), time.monotonic()
    found = outcome(lambda: manager.restore({"state": wrong}))[:13]
    is_soon = time.monotonic() - began < 10
    return [found, is_soon, outcome(lambda: manager.restore({"state": target}) and "restored")]


def test_different_target_in_one_fails_at_once(tmp_path: Path) -> None:
    with running(2) as job:
        job.call(save_steps, str(tmp_path / "run"), [1])
        answers = job.call(restore_with_another_target, str(tmp_path / "run"))
    assert answers == [["MismatchError", True, RESTORED]] * 2


class Numbers:
    """Data whose position process 0, or no process, accepts; it ends earlier in process 1."""

    def __init__(self, who_takes: str = "nobody") -> None:
        self.who_takes, self.at = who_takes, 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        if self.at >= (10 if is_first() else 3):
            raise StopIteration
        self.at += 1
        return self.at

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        if self.who_takes == "nobody" or not is_first():
            raise jct.IteratorStateError("another pipeline")
        self.at = state


def save_numbers(directory: str) -> None:
    data = Numbers()
    next(data)
    with jct.StepManager(directory) as manager:
        manager.save(5, {"state": state_of(1), "data": data})


def resume_numbers(directory: str, on_mismatch: Any, who_takes: str) -> str:
    data = Numbers(who_takes)

    def resume() -> int:
        with jct.CheckpointCallback(directory, data_on_mismatch=on_mismatch, save_on_exit=False) as ckpt:
            ckpt.resume(state_of(0), data)
        return data.at

    return outcome(resume)[:18]


@pytest.mark.parametrize(
    ("on_mismatch", "who_takes", "expected"), [("skip", "nobody", "IteratorStateError"), ("restart", "process 0", "0")]
)
def test_data_mismatch_in_one_is_handled_by_all(
    tmp_path: Path, on_mismatch: str, who_takes: str, expected: str
) -> None:
    with running(2) as job:
        job.call(save_numbers, str(tmp_path / "run"))
        assert job.call(resume_numbers, str(tmp_path / "run"), on_mismatch, who_takes) == [expected] * 2
