"""Runs of jobs with an error in one process: it reaches all processes, and all act alike."""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.jobs.arrays import are_equal, global_array
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.training import history
from tests.support.tiers import nightly_after


def state_of(step: int) -> dict[str, Any]:
    return {"w": global_array([512, 1024], [4], ["x"]) + step, "r": global_array([64], [4], []) * step}


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except jct.CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def is_state(state: dict[str, Any], step: int) -> bool:
    return are_equal(state, state_of(step))


class RecordedLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_steps(directory: str, steps: list[int]) -> None:
    with jct.StepManager(directory) as manager:
        for step in steps:
            manager.save(step, {"state": state_of(step)})


def restore_and_go_on(directory: str) -> dict[str, Any]:
    recorded = RecordedLines()
    logging.getLogger("jaxckpt_train").addHandler(recorded)
    try:
        with jct.StepManager(directory) as manager:
            manager.own()
            restored = manager.restore({"state": state_of(0)})
            step = manager.restored_step
            right = is_state(restored["state"], step or 0)
            manager.save((step or 0) + 10, {"state": restored["state"]})
            manager.wait()
            return {
                "step": step,
                "right": right,
                "steps": manager.steps,
                "damaged": manager.damaged,
                "lines": recorded.lines,
            }
    finally:
        logging.getLogger("jaxckpt_train").removeHandler(recorded)


def segment_of(directory: Path, process: int) -> Path:
    return next((directory / "state").glob(f"p{process:05d}-*.safetensors"))


@pytest.mark.parametrize("process", [0, 3])
def test_step_damaged_for_one_is_skipped_by_all(tmp_path: Path, job_of: JobOf, process: int) -> None:
    run = tmp_path / "run"
    job_of(4, 1).call(save_steps, str(run), [1, 2, 3])
    segment = segment_of(run / "step-0000000003", process)
    content = bytearray(segment.read_bytes())
    content[-100] ^= 1
    segment.write_bytes(content)
    answers = job_of(4, 1).call(restore_and_go_on, str(run))
    for answer in answers:
        assert (answer["step"], answer["right"]) == (2, True)
        assert (answer["steps"], answer["damaged"]) == ([1, 2, 12], [3])
    assert any("step 3 " in line and segment.name in line for line in answers[0]["lines"])
    assert [each["step"] for each in history(run, "set_aside")] == [3]


def restore_errors(directory: str, what: str) -> list[str]:
    target = {"state": state_of(0)}
    if what == "other shape" and jax.process_index() == 2:
        target["state"]["r"] = jax.ShapeDtypeStruct((65,), np.float32, sharding=target["state"]["r"].sharding)
    manager = jct.StepManager(directory)
    found = [outcome(lambda: manager.restore(target, step=7 if what == "no such step" else None) and "restored")]
    manager.close()
    return found


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("other shape", "MismatchError"),
        ("no such step", "StepNotFoundError"),
        ("all damaged", "CorruptCheckpointError"),
    ],
)
def test_failed_restore_raises_same_error_in_all(tmp_path: Path, job_of: JobOf, what: str, expected: str) -> None:
    run = tmp_path / "run"
    job_of(4, 1).call(save_steps, str(run), [1, 2])
    if what == "all damaged":
        for step in (1, 2):
            os.truncate(segment_of(run / f"step-000000000{step}", 1), 5000)
    answers = job_of(4, 1).call(restore_errors, str(run), what)
    assert all(answer[0].startswith(expected) for answer in answers), answers
    if what == "other shape":
        assert all("float32[64]" in answer[0] and "'r'" in answer[0].replace('"', "'") for answer in answers), answers


class Refuses:
    """A checkpointable whose own code fails when it is restored in one process."""

    def __init__(self, who: int = -1) -> None:
        self.who = who

    def get_state(self) -> dict[str, Any]:
        return {"position": 3}

    def set_state(self, state: dict[str, Any]) -> None:
        if jax.process_index() == self.who:
            raise RuntimeError(f"not from {state['position']}")


def save_with_own(directory: str) -> None:
    with jct.StepManager(directory) as manager:
        manager.save(1, {"state": state_of(1), "own": Refuses()})


def restore_with_own(directory: str, who: int) -> dict[str, Any]:
    settings = jct.StoreSettings(read_once=True, barrier_timeout_s=60.0)
    began, found = time.monotonic(), dict[str, Any]()
    with jct.StepManager(directory, settings=settings) as manager:
        try:
            manager.restore({"state": state_of(0), "own": Refuses(who)})
        except (jct.CheckpointError, RuntimeError) as error:
            found = {"error": f"{type(error).__name__}: {error}", "took_s": time.monotonic() - began}
        found["right"] = is_state(manager.restore({"state": state_of(0), "own": Refuses()})["state"], 1)
    return found


@pytest.mark.parametrize("who", [0, 2])
def test_failure_before_joint_read_is_reported_at_once(tmp_path: Path, job_of: JobOf, who: int) -> None:
    job_of(4, 1).call(save_with_own, str(tmp_path / "run"))
    answers = job_of(4, 1).call(restore_with_own, str(tmp_path / "run"), who)
    for number, answer in enumerate(answers):
        assert answer["error"].startswith("RuntimeError" if number == who else "OtherProcessError"), answer
        assert "not from 3" in answer["error"]
        assert answer["took_s"] < 30.0
        assert answer["right"]


class FullDisk(LocalBackend):
    """A disk that is full for the files of one process."""

    is_full = False

    def create(self, path: str, *, direct: Any) -> Any:
        if self.is_full and path.endswith(".safetensors"):
            raise jct.StorageError(errno.ENOSPC, "full", path)
        return super().create(path, direct=direct)


def save_to_a_full_disk(directory: str, who: int) -> dict[str, Any]:
    backend = FullDisk()
    manager = jct.StepManager(directory, backend=backend)
    manager.save(1, {"state": state_of(1)})
    manager.wait()
    backend.is_full = jax.process_index() == who
    result = manager.save(2, {"state": state_of(2)})
    assert result.pending is not None
    concurrent.futures.wait([result.pending.committed])  # does not mark the error as reported
    begun = result.saved
    backend.is_full = False
    second = outcome(
        lambda: manager.save(3, {"state": state_of(3)}).saved
    )  # raises the error of step 2, but saves step 3
    third = outcome(lambda: manager.save(4, {"state": state_of(4)}).saved)
    manager.wait()
    manager.close()
    return {"begun": begun, "second": second, "third": third, "steps": manager.steps}


@pytest.mark.parametrize("who", [0, 2])
def test_full_disk_of_one_fails_step_in_all(tmp_path: Path, job_of: JobOf, who: int) -> None:
    run = tmp_path / "run"
    for answer in job_of(4, 1).call(save_to_a_full_disk, str(run), who):
        assert answer["begun"]
        assert answer["second"].startswith("StorageError: [Errno 28]"), answer
        assert answer["third"] == "True"
        assert answer["steps"] == [1, 3, 4]
    assert sorted(path.name for path in run.glob("step-*")) == [f"step-000000000{step}" for step in (1, 3, 4)]
    assert [each for each in run.iterdir() if ".tmp-" in each.name] == []
    assert jct.verify(run / "step-0000000003").ok


def stall_in_one(directory: str, who: int) -> dict[str, Any]:
    """Save an update while the disk of one process accepts nothing, and then save it again."""
    backend = HoldingBackend("create", f"p{who:05d}-" if jax.process_index() == who else "none")
    options: dict[str, Any] = {"save_interval_steps": 2, "stall_timeout_s": 0.5}
    with callback_on(backend, directory, store=jct.StoreSettings(snapshot="stream"), **options) as ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        result = ckpt(state_of(2))
        backend.go.set()
        assert result.pending is not None
        concurrent.futures.wait([result.pending.committed])  # does not mark the error as reported
        again = outcome(lambda: ckpt.save_now().saved)
        ckpt.wait_until_finished()
        return {"begun": result.saved, "again": again.partition(":")[0], "steps": ckpt.manager.steps}


@pytest.mark.parametrize("who", [0, 2])
def test_stall_of_one_process_fails_save_in_all(tmp_path: Path, job_of: JobOf, who: int) -> None:
    answers = job_of(4, 1).call(stall_in_one, str(tmp_path / "run"), who)
    assert answers == [{"begun": True, "again": "CheckpointTimeoutError", "steps": [2]}] * 4


def loop_that_one_leaves(directory: str, who: int) -> dict[str, Any]:
    settings = jct.StoreSettings(barrier_timeout_s=24.0)
    began, found, state = time.monotonic(), "", state_of(1)
    try:
        with jct.CheckpointCallback(directory, save_interval_steps=1, store=settings) as ckpt:
            for step in range(1, 5):
                if step == 3 and jax.process_index() == who:
                    raise RuntimeError("an error of the loop's own")
                ckpt(state, step=step)
    except (RuntimeError, jct.CheckpointError) as error:
        found = f"{type(error).__name__}: {error}"
    with jct.StepManager(directory) as manager:
        restored = manager.restore({"state": state_of(0)})
        return {"error": found, "took_s": time.monotonic() - began, "step": manager.restored_step,
                "right": is_state(restored["state"], 1)}  # fmt: skip


@pytest.mark.parametrize("who", nightly_after(1, [0, 2]))
def test_process_that_left_its_loop_is_not_awaited(tmp_path: Path, job_of: JobOf, who: int) -> None:
    for number, answer in enumerate(job_of(4, 1).call(loop_that_one_leaves, str(tmp_path / "run"), who)):
        expected = "RuntimeError: an error" if number == who else f"OtherProcessError: .*process {who} of 4 left"
        assert re.match(expected, answer["error"]), answer
        assert answer["took_s"] < 20.0
        assert (answer["step"], answer["right"]) == (2, True)


def wrong_set_up(directory: str, what: str) -> str:
    me = jax.process_index()
    if what == "other directory" and me == 1:
        directory = f"{directory}-of-1"
    policy = jct.FixedIntervalPolicy(2 if me == 1 else 4) if what == "other interval" else None

    def run() -> Any:
        with jct.StepManager(directory, save_decision_policy=policy) as manager:
            step = 5 if what == "other step" and me == 2 else 4
            state: Any = {"w": object()} if what == "cannot be saved" and me == 3 else state_of(1)
            return manager.save(step, {"state": state}).pending.wait() and "saved"  # type: ignore[union-attr]

    return outcome(run)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("other directory", "OtherProcessError: .*process 1 saves to .*run-of-1"),
        ("other step", "OtherProcessError: .*process 2 saves step 5 .*process 0 saves step 4"),
        ("cannot be saved", "UnsupportedLeafError"),
        ("owned by another job", "DirectoryLockedError: .*owned by .*jax.distributed.initialize"),
        ("other interval", r"OtherProcessError: .*process 1 decides .*\(interval=2\).*process 0 by .*\(interval=4\)"),
    ],
)
def test_wrong_setup_fails_in_all_without_damage(tmp_path: Path, job_of: JobOf, what: str, expected: str) -> None:
    run = tmp_path / "run"
    with jct.StepManager(run) as manager:
        manager.save(1, {"state": np.arange(5)}).pending.wait()  # type: ignore[union-attr]
        if what != "owned by another job":
            manager.close()
        for answer in job_of(4, 1).call(wrong_set_up, str(run), what):
            assert re.match(expected, answer), answer
    assert [path.name for path in run.glob("*step-*")] == ["step-0000000001"]
    assert jct.load(run / "step-0000000001").tolist() == list(range(5))


def save_where_process_1_has_a_disk_of_its_own(shared: str, own: str) -> str:
    """Mount another disk over the directory in process 1, as if each machine had its own."""
    import ctypes

    from jaxckpt_train.run import job

    job.SEEN_WITHIN_S = 5.0
    if jax.process_index() == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x20000) == 0  # a name space of mounts for this thread
        assert libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None) == 0  # make all mounts private
        assert libc.mount(own.encode(), shared.encode(), None, 1 << 12, None) == 0  # bind
    return outcome(lambda: jct.StepManager(shared).own())


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_directory_local_to_each_host_is_refused(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    with running(2, 1) as job:
        answers = job.call(save_where_process_1_has_a_disk_of_its_own, str(shared), str(own))
    for answer in answers:
        assert answer.startswith("OtherProcessError: ")
        assert "process 1 " in answer
    assert list(own.iterdir()) == []
    assert list(shared.glob("step-*")) == []


def fail_in_loop(directory: str) -> list[Any]:
    """Raise an error in the loop of process 1; return the error of this process, and after how long it came."""
    began = time.monotonic()
    try:
        with jct.CheckpointCallback(directory, save_interval_steps=10**9) as ckpt:
            ckpt.resume({"step": 0})
            for step in ckpt.steps(10**9):
                if step == 5 and jax.process_index() == 1:
                    raise ValueError("the loss diverged")
                ckpt({"step": step + 1})
    except (jct.CheckpointError, ValueError) as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return []


def test_failed_process_is_not_awaited_in_agreement(tmp_path: Path) -> None:
    with running(2, 1, preemption_service=False) as job:
        first, second = job.call(fail_in_loop, str(tmp_path))
    assert first[:2] == ["OtherProcessError", first[1]]
    assert "process 1" in first[1]
    assert first[2] < 60
    assert second[:2] == ["ValueError", "the loss diverged"]
