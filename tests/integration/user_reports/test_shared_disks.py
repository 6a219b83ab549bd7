"""Problems of other checkpointers with disks: retention, copies, two jobs on one directory."""

from __future__ import annotations

import datetime
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.conftest import RunPython
from tests.support.runs import Clock, files_below, made_run, save_steps, step_of, step_path, talking_to

JOB = """
import sys
import jaxckpt_train as jct
from tests.support.runs import state_of
with jct.CheckpointCallback(sys.argv[1], save_interval_steps=1) as ckpt:
    ckpt.resume(state_of(0))
    for step in ckpt.steps(3):
        ckpt(state_of(step + 1))
    ckpt.wait_until_finished()
    print("saved", flush=True)
    sys.stdin.readline()
"""


# 21. Time-based and tiered retention.
def test_steps_are_kept_by_time_and_number(tmp_path: Path) -> None:
    class ManualClock(Clock):
        def __call__(self) -> datetime.datetime:
            return self.now

    clock = ManualClock()
    keep = jct.AnyPreservationPolicy([jct.LatestN(1), jct.EveryNSeconds(600), jct.EveryNSteps(1000)])
    settings = jct.StoreSettings(durability="none")
    with jct.StepManager(tmp_path, preservation_policy=keep, clock=clock, settings=settings) as manager:
        for step in range(100, 2600, 100):
            clock.now += datetime.timedelta(minutes=2)
            save_steps(manager, step)
    kept = jct.StepManager(tmp_path).steps
    assert {1000, 2000, 2500} <= set(kept)
    tenth_minutes = [step for step in kept if step not in (1000, 2000, 2500)]
    assert [later - step for step, later in itertools.pairwise(tenth_minutes)] == [500] * 4


# 25. A checkpoint directory can be copied.
def test_only_a_complete_rsync_copy_loads(tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    run = made_run(tmp_path / "run", 10, 20)
    copy = ["rsync", "-a", f"{run}/", str(tmp_path / "copy")]
    subprocess.run([*copy, "--exclude=COMMIT"], check=True)
    assert jct.StepManager(tmp_path / "copy").steps == []
    subprocess.run(copy, check=True)
    assert step_of(jct.StepManager(tmp_path / "copy").restore()) == 20


def test_copy_of_live_run_is_usable(tmp_path: Path) -> None:
    """The copied lock file names a live process, so the copy can be read but not owned."""
    with talking_to(JOB, tmp_path / "run") as job:
        assert job.read() == "saved"
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        reader = jct.StepManager(tmp_path / "copy")
        assert step_of(reader.restore()) == 3
        with pytest.raises(jct.DirectoryLockedError, match=f"owned by process {job.process.pid}"):
            reader.own()


# 27. Wrong multi-process set-ups are detected.
def test_second_job_on_the_directory_is_refused(tmp_path: Path, run_python: RunPython) -> None:
    run = tmp_path / "run"
    with talking_to(JOB, run) as first:
        assert first.read() == "saved"
        before = files_below(run)
        second = run_python(JOB, run)
        assert second.returncode == 1
        assert f"owned by process {first.process.pid} on" in second.stderr
        assert "choose another directory" in second.stderr
        assert files_below(run) == before
        first.tell("end")
        assert first.finish()[0] == 0
    assert jct.StepManager(run).steps == [1, 2, 3]
    assert all(jct.verify(step_path(run, step)).ok for step in (1, 2, 3))
