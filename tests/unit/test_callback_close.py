"""A closing callback waits no longer than its deadline, and then the next owner can take the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.runs import made_run, state_of
from tests.support.signal_handlers import WATCHED, handlers_put_back

pytestmark = pytest.mark.timeout(120)

GRACE_S, LATEST_S = 3.0, 8.0


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def sent_soon(number: int = signal.SIGTERM) -> None:
    """Send a signal while the main thread waits."""
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()


def check_next_owner(directory: Path, *steps: int) -> None:
    """Check that the directory is released, at the latest once its disk answers."""
    with jct.StepManager(directory) as following:
        following.own()
        assert following.steps == list(steps)


def test_wait_for_deletions_ends_at_deadline(tmp_path: Path) -> None:
    backend = HoldingBackend("remove", ".step-0000000001.tmp-")
    ckpt = callback_on(backend, tmp_path, grace_period_s=GRACE_S, save_interval_steps=1, keep_latest=1)
    try:
        with ckpt:
            ckpt.resume(state_of(0))
            for step in (1, 2):
                ckpt(state_of(step))
                ckpt.wait_until_finished()
            assert backend.reached.wait(60)
            sent_soon()
            started = time.monotonic()
        took_s = time.monotonic() - started
    finally:
        backend.go.set()
    assert took_s < LATEST_S
    check_next_owner(tmp_path, 2)


def test_wait_for_save_ends_at_deadline(tmp_path: Path) -> None:
    backend = HoldingBackend("rename", "step-0000000002")
    ckpt = callback_on(backend, tmp_path, grace_period_s=GRACE_S, save_interval_steps=1)
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(9):
            ckpt(state_of(step + 1))
            if step == 1:
                sent_soon()
                started = time.monotonic()
            ckpt.wait_until_finished()
    took_s = time.monotonic() - started
    given_up = ckpt.manager._save_slot.given_up
    assert given_up is not None
    assert left.value.code == 75
    assert ckpt.preempted
    assert jct.StepManager(tmp_path).steps == [1]
    backend.go.set()
    given_up.wait(60)
    assert took_s < LATEST_S
    check_next_owner(tmp_path, 1, 2)


@pytest.mark.parametrize("grace_period_s", [None, 60.0])
def test_save_committed_before_deadline_is_awaited(tmp_path: Path, grace_period_s: float | None) -> None:
    backend = HoldingBackend("rename", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, grace_period_s=grace_period_s, save_interval_steps=1)
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        sent_soon()
        threading.Timer(1.0, backend.go.set).start()
        ckpt.wait_until_finished()
        assert ckpt.latest_step() == 1
        ckpt(state_of(2))
    check_next_owner(tmp_path, 1, 2)


def resume(ckpt: jct.CheckpointCallback) -> Any:
    return ckpt.resume(state_of(0))


def steps(ckpt: jct.CheckpointCallback) -> Any:
    return ckpt.steps(5)


def check_signal_ends(ckpt: jct.CheckpointCallback, disk: HoldingBackend, use: Callable[[Any], Any]) -> None:
    """Check that a signal ends `use` while `disk` hangs, which it does once the callback owns the run."""
    disk.go.set()
    ckpt._start()
    disk.go.clear()
    sent_soon()
    started = time.monotonic()
    try:
        with pytest.raises(jct.Preempted, match="signal SIGTERM"):
            use(ckpt)
        assert time.monotonic() - started < LATEST_S
    finally:
        disk.go.set()


def test_signal_ends_restore_on_hung_disk(tmp_path: Path) -> None:
    disk = HoldingBackend("open", "step-0000000005")
    options: dict[str, Any] = {"grace_period_s": 20.0, "on_preemption": "raise", "progress": True}
    check_signal_ends(callback_on(disk, made_run(tmp_path, 5), **options), disk, resume)
    check_next_owner(tmp_path, 5)


@pytest.mark.parametrize("use", [resume, steps])
def test_signal_ends_fresh_start_on_hung_disk(tmp_path: Path, use: Callable[[Any], Any]) -> None:
    disk = HoldingBackend("list", str(tmp_path))
    options: dict[str, Any] = {"grace_period_s": GRACE_S, "on_preemption": "raise"}
    check_signal_ends(callback_on(disk, tmp_path, **options), disk, use)
    check_next_owner(tmp_path)


@pytest.mark.parametrize("grace_period_s", [None, 30.0])
def test_interrupted_close_releases_the_run(tmp_path: Path, grace_period_s: float | None) -> None:
    backend = HoldingBackend("rename", "step-0000000002")
    ckpt = callback_on(backend, tmp_path, grace_period_s=grace_period_s, save_interval_steps=1)
    with pytest.raises(KeyboardInterrupt), ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        ckpt(state_of(2))
        sent_soon(signal.SIGINT)
    pending = ckpt.manager._save_slot.pending
    assert pending is not None
    with pytest.raises(jct.DirectoryLockedError):  # as long as it writes
        jct.StepManager(tmp_path).own()
    backend.go.set()
    pending.wait(60)
    check_next_owner(tmp_path, 1, 2)


def test_run_is_released_despite_stuck_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HoldingBackend("rename", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, grace_period_s=30.0)
    with pytest.raises(jct.CheckpointTimeoutError, match="no progress"), ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        assert ckpt.save_now().saved
        pending = ckpt.manager._save_slot.pending
        assert pending is not None
        assert backend.reached.wait(60)
        monkeypatch.setattr(pending.tracker, "waited_s", 600.0)
    backend.go.set()
    pending.wait(60)
    check_next_owner(tmp_path, 1)
