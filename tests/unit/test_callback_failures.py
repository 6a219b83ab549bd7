"""Failed saves: a loop that catches the error loses only the steps that failed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import callback_on
from tests.support.runs import state_of


class FullAtTimes(LocalBackend):
    """A disk that is full when some steps are saved."""

    def __init__(self, *steps: int) -> None:
        self._names = [f"step-{step:010d}" for step in steps]

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        if any(name in path for name in self._names):
            raise jct.StorageError(errno.ENOSPC, "no space", path)
        super().make_directory(path, parents=parents, sync=sync)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("full", [(4,), (4, 5, 6, 7, 8), (12,), range(1, 13)], ids=str)
def test_a_failure_costs_the_step_that_met_it(tmp_path: Path, interval: int, full: tuple[int, ...]) -> None:
    raised = 0
    ckpt = callback_on(FullAtTimes(*full), tmp_path, save_interval_steps=interval)
    try:
        with ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(12):
                try:
                    ckpt(state_of(step + 1))
                except jct.StorageError:
                    raised += 1
    except jct.StorageError:
        raised += 1  # of the last one
    due = [step for step in range(1, 13) if step % interval == 0]
    failed = [step for step in due if step in full]
    assert jct.StepManager(tmp_path).steps == [step for step in due if step not in full]
    assert raised == len(failed)


def test_manual_save_raises_and_may_retry(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, backend=FullAtTimes(1)) as manager:
        manager.save(1, {"state": state_of(1)})
        with pytest.raises(jct.StorageError):
            manager.save(2, {"state": state_of(2)})
        assert manager.save(2, {"state": state_of(2)}).saved
        manager.wait()
        assert manager.steps == [2]


def test_loop_error_is_not_masked_by_save_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(tmp_path, backend=FullAtTimes(1)) as manager:
        manager.save(1, {"state": state_of(1)})
        with pytest.raises(KeyError), manager.deferring_errors():
            manager.save(2, {"state": state_of(2)})
            raise KeyError("own")
        assert "the previous save failed" in caplog.text
        manager.wait()
        assert manager.steps == [2]


def test_resume_after_failed_save_starts_anew(tmp_path: Path) -> None:
    ckpt = callback_on(FullAtTimes(10), tmp_path, save_interval_steps=1)
    with ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(10), step=10)
        with pytest.raises(jct.StorageError):
            ckpt.manager.wait()
        ckpt.resume(state_of(0))
        assert ckpt.completed_steps == 0
        assert ckpt(state_of(5), step=5).saved
    assert jct.StepManager(tmp_path).steps == [5]


def test_lower_steps_are_saved_after_roll_back(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=1, keep_latest=9) as ckpt:
        ckpt.resume(state_of(0))
        for step in range(1, 5):
            ckpt(state_of(step), step=step)
        ckpt.manager.restore({"state": state_of(0)}, step=2, roll_back=True)
        assert ckpt(state_of(3), step=3).saved
    with jct.StepManager(tmp_path) as manager:
        assert manager.latest == 3
