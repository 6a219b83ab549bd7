"""A disk that refuses a sync once and takes the next one: the system has forgotten what it could not write.

So nothing goes that such a step has replaced, in this process and in later ones, until a later step is on the disk.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps.preservation_policies import LatestN
from jaxckpt_train.store.local import LocalBackend
from tests.steps.runs import save_steps, state_of

PLAIN = jct.StoreSettings(durability="none")


def step_directories(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


class RefusesOnce(LocalBackend):
    """The first sync of a data file below a directory with this name."""

    def __init__(self, name: str) -> None:
        self.name, self.refused = name, list[str]()

    def sync(self, path: str) -> None:
        if not self.refused and f"/{self.name}/" in path and path.endswith(".safetensors"):
            self.refused.append(path)
            raise StorageError(errno.EIO, "refused", path)
        super().sync(path)


def manager(run: Path, backend: LocalBackend, keep: int) -> jct.StepManager:
    return jct.StepManager(run, preservation_policy=LatestN(keep), settings=PLAIN, backend=backend)


def overwrite(steps: jct.StepManager, step: int) -> None:
    steps.save(step, {"state": state_of(step)}, overwrite=True)
    steps.wait()
    assert steps._run._deleter.wait(60)


def test_an_older_step_stays_until_a_later_one_is_on_the_disk(tmp_path: Path) -> None:
    backend = RefusesOnce("step-0000000002")
    with manager(tmp_path, backend, 1) as steps:
        save_steps(steps, 1, 2)
        assert steps._run._deleter.wait(60)
        assert backend.refused
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002"]
        save_steps(steps, 3)
    assert step_directories(tmp_path) == ["step-0000000003"]


@pytest.mark.parametrize("is_new_process", [False, True])
def test_the_generation_before_one_that_was_refused_stays_as_long_as_that_does(
    tmp_path: Path, is_new_process: bool
) -> None:
    steps = manager(tmp_path, RefusesOnce("step-0000000002.g1"), 2)
    save_steps(steps, 1, 2)
    overwrite(steps, 2)
    both = ["step-0000000002", "step-0000000002.g1"]
    assert step_directories(tmp_path) == ["step-0000000001", *both]
    if is_new_process:
        steps.close()
        steps = manager(tmp_path, LocalBackend(), 2)
        steps.restore()
    save_steps(steps, 3)
    assert steps._run._deleter.wait(60)
    assert step_directories(tmp_path) == [*both, "step-0000000003"]
    save_steps(steps, 4)
    steps.close()
    assert step_directories(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_what_a_roll_back_has_left_behind_stays_if_the_save_after_it_was_refused(tmp_path: Path) -> None:
    """That save is made durable before the roll-back is noted, which is when the disk refuses it."""
    backend = RefusesOnce("step-0000000002.g1")
    with manager(tmp_path, backend, 2) as steps:
        save_steps(steps, 1, 2)
        steps.restore(step=1)
        save_steps(steps, 2)
        assert steps._run._deleter.wait(60)
        assert backend.refused
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002", "step-0000000002.g1"]
        save_steps(steps, 3, 4)
    assert step_directories(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_a_name_that_was_given_again_is_another_save(tmp_path: Path) -> None:
    """What was noted of a step is of that save alone."""
    with manager(tmp_path, RefusesOnce("step-0000000001.g1"), 1) as steps:
        save_steps(steps, 1)
        overwrite(steps, 1)
        assert [entry.is_unsynced for entry in steps._run.entries()] == [True]
        save_steps(steps, 2)
    with manager(tmp_path, LocalBackend(), 1) as steps:
        steps.restore()
        overwrite(steps, 1)
        overwrite(steps, 1)
        assert [entry.is_unsynced for entry in steps._run.entries()] == [False] * len(steps._run.entries())
