"""A real file system that stops responding does not stop the loop; when it responds again, saves continue."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.faults.fuse_disk import WEDGED, FuseDisk, fuse_disk, why_not
from tests.support.backend_contract import BackendContract

pytestmark = pytest.mark.timeout(120)

STALL_S = 0.3
LONGEST_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FuseDisk]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"cannot mount a file system in user space: {reason}")
    with fuse_disk(tmp_path) as made:
        yield made


class TestFuseDisk(BackendContract):
    """The simulated file system keeps the contract of all backends."""

    direct: Any = False

    @pytest.fixture
    def backend(self) -> Any:
        return LocalBackend()

    @pytest.fixture
    def root(self, disk: FuseDisk) -> str:
        return str(disk.path)

    def raw(self, backend: Any, path: str) -> bytes:
        return Path(path).read_bytes()

    def names(self, backend: Any, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def backdate(self, backend: Any, path: str) -> None:
        found = os.stat(path)
        os.utime(path, (found.st_atime - 60, found.st_mtime - 60))


def state_of(step: int) -> dict[str, Any]:
    return {"state": {"w": np.full(200_000, step, np.float32)}}


def step_of(restored: dict[str, Any]) -> int:
    array = np.asarray(restored["state"]["w"])
    assert (array == array[0]).all()
    return int(array[0])


def saved(manager: jct.StepManager, *steps: int) -> None:
    for step in steps:
        assert manager.save(step, state_of(step)).saved
        manager.wait(LONGEST_S)


def test_saves_are_skipped_while_disk_is_stuck(disk: FuseDisk, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(disk.path / "run", stall_timeout_s=STALL_S) as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            first, *others = [manager.save(step, state_of(step)) for step in range(2, 6)]
            assert first.saved
            assert [other.saved for other in others] == [False] * 3
            assert manager.latest == 1
        finally:
            disk.set()
        assert "step 3 is skipped" in caplog.text
        assert "does its disk still answer?" in others[0].reason
        manager.wait(LONGEST_S)
        saved(manager, 6)
        assert manager.steps == [1, 2, 6]
        assert [step_of(manager.restore(step=step)) for step in (1, 2, 6)] == [1, 2, 6]


def test_stalled_save_is_waited_for_once(disk: FuseDisk) -> None:
    with jct.StepManager(disk.path / "run", stall_timeout_s=STALL_S) as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            manager.save(2, state_of(2))
            manager.save(3, state_of(3))
            started = time.monotonic()
            for step in range(4, 40):
                assert not manager.save(step, state_of(step)).saved
            assert time.monotonic() - started < 36 * STALL_S / 2
        finally:
            disk.set()


def test_stalled_save_raises_if_requested(disk: FuseDisk) -> None:
    with jct.StepManager(disk.path / "run", stall_timeout_s=STALL_S, if_stalled="raise") as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            manager.save(2, state_of(2))
            with pytest.raises(CheckpointTimeoutError, match=r"step 2 to .*: no progress"):
                manager.save(3, state_of(3))
        finally:
            disk.set()


def test_skipping_while_busy_warns_of_a_stall(disk: FuseDisk, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(disk.path / "run", stall_timeout_s=STALL_S, if_busy="skip") as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            manager.save(2, state_of(2))
            reasons = [manager.save(step, state_of(step)).reason for step in loop(4 * STALL_S)]
        finally:
            disk.set()
        assert "if_busy is 'skip'" in reasons[0]
        assert "does its disk still answer?" in reasons[-1]
        assert caplog.text.count("does its disk still answer?") == 1
        manager.wait(LONGEST_S)
        saved(manager, 10**6)


def test_skipping_while_busy_raises_if_requested(disk: FuseDisk) -> None:
    options: Any = {"stall_timeout_s": STALL_S, "if_busy": "skip", "if_stalled": "raise"}
    with jct.StepManager(disk.path / "run", **options) as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            manager.save(2, state_of(2))
            with pytest.raises(CheckpointTimeoutError, match="does its disk still answer"):
                for step in loop(20 * STALL_S):
                    manager.save(step, state_of(step))
        finally:
            disk.set()


def loop(seconds: float) -> Iterator[int]:
    """Yield steps of a training for some seconds."""
    until = time.monotonic() + seconds
    for step in itertools.count(3):
        if time.monotonic() >= until:
            return
        time.sleep(0.01)  # the step
        yield step


def test_closing_with_stuck_save_raises_instead_of_hanging(disk: FuseDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = jct.StepManager(disk.path / "run")
    saved(manager, 1)
    disk.set(WEDGED)
    try:
        pending = manager.save(2, state_of(2)).pending
        assert pending is not None
        outcome = pending.outcome
        with monkeypatch.context() as patient:
            patient.setattr(pending, "outcome", lambda timeout_s, patience_s, until: outcome(timeout_s, STALL_S))
            with pytest.raises(CheckpointTimeoutError, match="does its disk still answer"):
                manager.close()
    finally:
        disk.set()
    pending.wait(LONGEST_S)
    assert jct.StepManager(disk.path / "run").steps == [1, 2]


def test_stuck_write_releases_the_state(disk: FuseDisk, caplog: pytest.LogCaptureFixture) -> None:
    settings = jct.StoreSettings(snapshot="stream", staging_bytes=4 << 20)
    with jct.StepManager(disk.path / "run", stall_timeout_s=STALL_S, settings=settings) as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        try:
            large = jnp.full((1 << 20, 8), 2.0)
            results = [manager.save(step, {"state": {"w": large}}) for step in (2, 3)]
            assert [result.saved for result in results] == [False, False]
            assert "before its state was copied" in results[0].reason
            large.delete()  # like a step with donated arguments
        finally:
            disk.set()
        manager.wait(LONGEST_S)
        saved(manager, 4)
        assert manager.steps == [1, 4]
        assert [step_of(manager.restore(step=step)) for step in (1, 4)] == [1, 4]


def test_loop_continues_with_notice_file_on_stuck_disk(disk: FuseDisk) -> None:
    run, notice = disk.path / "run", disk.path / "leave"
    ckpt = jct.CheckpointCallback(
        str(run), save_interval_steps=1, stall_timeout_s=STALL_S, notice_file=str(notice), on_preemption="raise"
    )
    with pytest.raises(jct.Preempted), ckpt:
        ckpt.resume({"w": np.zeros(10)})
        ckpt({"w": np.ones(10)})
        ckpt.wait_until_finished()
        disk.set(WEDGED)
        try:
            ckpt._shutdown._file._next = 0.0  # type: ignore[union-attr]  # a second has passed
            results = [ckpt({"w": np.full(10, step)}) for step in range(2, 30)]
            assert sum(result.saved for result in results) == 1
        finally:
            disk.set()
        notice.touch()
        for step in range(30, 10**6):
            ckpt({"w": np.full(10, step)})
    assert jct.StepManager(run).latest == ckpt.completed_steps


def test_dead_server_fails_save_and_keeps_older_step(disk: FuseDisk) -> None:
    with jct.StepManager(disk.path / "run") as manager:
        saved(manager, 1)
        disk.set(WEDGED)
        manager.save(2, state_of(2))
        disk.die()
        with pytest.raises(jct.StorageError) as caught:
            manager.wait(LONGEST_S)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    assert step_of(jct.StepManager(disk.backing / "run").restore()) == 1


def test_load_from_stuck_disk_times_out(disk: FuseDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", 2.0)
    run = disk.path / "run"
    with jct.StepManager(run) as manager:
        assert manager.save(1, {"state": {"w": np.ones(3 << 20)}}).saved
    reads: list[int] = []

    def progress(count: int) -> None:
        if not reads:
            disk.set(WEDGED)
        reads.append(count)

    try:
        with pytest.raises(CheckpointTimeoutError, match=r"step-0000000001: jaxckpt-read: no progress for"):
            jct.StepManager(run).restore(progress=progress)
    finally:
        disk.set()
    assert sum(reads) < 8 * (3 << 20)
    restored = jct.StepManager(run).restore()
    assert np.asarray(restored["state"]["w"]).tobytes() == np.ones(3 << 20).tobytes()


CALLS: dict[str, Callable[[jct.StepManager], object]] = {
    "own": jct.StepManager.own,
    "restore": jct.StepManager.restore,
    "steps": lambda manager: manager.steps,
    "metadata": jct.StepManager.metadata,
    "pin": lambda manager: manager.pin(1),
    "first save": lambda manager: manager.save(2, state_of(2)),
    "load": lambda manager: jct.load(f"{manager.directory}/step-0000000001"),
    "verify": lambda manager: jct.verify(f"{manager.directory}/step-0000000001"),
    "save of its own": lambda manager: jct.save(f"{manager.directory}/other", state_of(2), overwrite=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_first_call_on_stuck_disk_times_out(disk: FuseDisk, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    with jct.StepManager(disk.path / "run") as manager:
        saved(manager, 1)
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", STALL_S)
    manager = jct.StepManager(disk.path / "run")
    disk.set(WEDGED)
    try:
        with pytest.raises(CheckpointTimeoutError, match="no progress for 1 s"):
            call(manager)
    finally:
        disk.set()
    call(manager)
    manager.close()
