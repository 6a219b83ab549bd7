"""The last save of a preempted job, with slow and failing disks."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.cost_model import ShutdownPlan
from jaxckpt_train.preemption.shutdown import GracefulShutdown, Outcome
from jaxckpt_train.run.saving import SaveResult
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.interrupts import once_waiting
from tests.support.runs import Counter, state_of, step_of
from tests.support.shutdowns import FakeManager
from tests.support.signal_handlers import WATCHED, handlers_put_back


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def send(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), getattr(signal, name))


def check_saved(directory: Path, step: int) -> None:
    """Check that the run has exactly this step, with its position in the data."""
    manager = jct.StepManager(directory)
    assert manager.steps == [step]
    restored = manager.restore({"state": state_of(0), "data": Counter()})
    assert (step_of(restored), restored["data"].position) == (step, step)


def test_overlong_save_is_abandoned_without_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = HoldingBackend("rename", "step-0000000002")
    ckpt = callback_on(backend, tmp_path, grace_period_s=2.0)
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        assert ckpt.save_now().saved
        ckpt.wait_until_finished()
        send()
        ckpt(state_of(2))
    assert left.value.code == 75
    assert "given up: saving step 2" in caplog.text
    assert "step 1 is saved" in caplog.text
    assert jct.StepManager(tmp_path).steps == [1]
    given_up = ckpt.manager._save_slot.given_up
    assert given_up is not None
    backend.go.set()
    given_up.wait(60)  # harmless: a step that is committed later is complete
    assert jct.StepManager(tmp_path).steps == [1, 2]
    with jct.StepManager(tmp_path) as next_owner:
        assert next_owner.save(3, {"state": state_of(3)}).saved


def test_save_is_awaited_without_grace_period(tmp_path: Path) -> None:
    backend, data = HoldingBackend("rename", "step-0000000001"), Counter()
    ckpt = callback_on(backend, tmp_path)
    releasing = threading.Thread(target=lambda: backend.reached.wait() and backend.go.set())
    releasing.start()
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0), data)
        next(data)
        send()
        ckpt(state_of(1))
    releasing.join()
    check_saved(tmp_path, 1)


def test_save_under_way_is_finished_before_last_one(tmp_path: Path) -> None:
    backend = HoldingBackend("rename", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, save_interval_steps=1)
    releasing = threading.Thread(target=lambda: backend.reached.wait() and backend.go.set())
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        send()
        releasing.start()
        ckpt(state_of(2))
    releasing.join()
    assert jct.StepManager(tmp_path).steps == [1, 2]


@pytest.mark.parametrize("noticed_by", ["call", "poll", "the end of a step"])
def test_last_update_is_saved_after_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, noticed_by: str
) -> None:
    backend = RefusingBackend("create", "step-0000000002", errno.EIO, 1)
    ckpt = callback_on(backend, tmp_path, save_interval_steps=2)
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(50):
            assert step <= 2
            if step == 2 and noticed_by == "call":
                send()
            ckpt(state_of(step + 1))
            if step == 1:
                failed = ckpt.manager._save_slot.pending
                assert failed is not None
                assert failed.committed.exception() is not None
                if noticed_by != "call":
                    send()
                if noticed_by == "poll":
                    assert ckpt.poll()
    assert "the previous save failed" in caplog.text
    assert "refused to create" in caplog.text
    assert jct.StepManager(tmp_path).latest == (2 if noticed_by == "poll" else 3)


def test_failed_last_save_raises_its_error(tmp_path: Path) -> None:
    backend = RefusingBackend("create", "step-0000000002", errno.ENOSPC, 100)
    with (
        pytest.raises(jct.StorageError, match="refused to create") as caught,
        callback_on(backend, tmp_path) as ckpt,
    ):
        ckpt.resume({"w": jnp.zeros(3)})
        for step in ckpt.steps(50):
            if step == 1:
                send()
            ckpt({"w": jnp.zeros(3)})
    assert caught.value.errno == errno.ENOSPC
    assert jct.StepManager(tmp_path).steps == []


class FullOnceReleased(HoldingBackend):
    """A disk that reports no space for a step, once it is released."""

    def rename(self, source: str, target: str) -> None:
        self._pass("rename", target)
        if self._part in target:
            raise jct.StorageError(errno.ENOSPC, "no space", target)
        super().rename(source, target)


@pytest.mark.parametrize("asked_by", ["a signal", "the time limit"])
def test_request_during_close_still_reports_failure(tmp_path: Path, asked_by: str) -> None:
    backend = FullOnceReleased("rename", "step-0000000003")
    ckpt = callback_on(backend, tmp_path, grace_period_s=60.0, max_run_time_s=10**6)
    now = [0.0]

    def ask() -> None:
        now[0] = 10.0**7
        if asked_by == "a signal":
            send()
        while ckpt._shutdown.noticed_at is None:
            noticed.wait(0.01)
        backend.go.set()

    noticed = threading.Event()
    if asked_by == "the time limit":
        ckpt._shutdown._monotonic = lambda: now[0]
        ckpt._shutdown._limit._monotonic = lambda: now[0]  # type: ignore[union-attr]
    with pytest.raises(jct.StorageError, match="no space"), ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(3):
            ckpt(state_of(step + 1))
        once_waiting(ask)
    assert jct.StepManager(tmp_path).steps == []


@pytest.mark.parametrize("grace_period_s", [None, 60.0])
def test_broken_loop_reports_failed_last_save(tmp_path: Path, grace_period_s: float | None) -> None:
    backend = FullOnceReleased("rename", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, save_interval_steps=1, grace_period_s=grace_period_s)
    with pytest.raises(jct.StorageError, match="no space"), ckpt:
        ckpt.resume(state_of(0))
        for _ in ckpt.steps(10):
            ckpt(state_of(1))
            send()
            once_waiting(backend.go.set)
            break


def test_abandoned_save_never_exits_with_zero(tmp_path: Path) -> None:
    backend = HoldingBackend("rename", "step-0000000001")
    ckpt = callback_on(backend, tmp_path, grace_period_s=0.5, exit_code=0)
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        send()
        ckpt(state_of(1))
    assert left.value.code == 1
    backend.go.set()
    assert ckpt.manager._save_slot.given_up is not None
    ckpt.manager._save_slot.given_up.wait(60)


LOST = jct.CheckpointTimeoutError("process 3 of 4 did not arrive for 300 s; see its log")


class LosingManager(FakeManager):
    """The manager of a run that loses another process while it leaves."""

    def __init__(self, fails: str) -> None:
        self._fails, self.codes = fails, list[int]()
        self._outcomes = [None, LOST if fails == "the last save" else None]

    def leaves(self, left_s: float | None = None) -> None: ...

    def settle(self, timeout_s: float | None = None, *, waits_for_copies: bool = True) -> BaseException | None:
        if self._fails == "the wait":
            raise LOST
        return self._outcomes.pop(0)

    def plan_to_leave(self, unsaved: int, left_s: float | None) -> ShutdownPlan:
        if self._fails == "the plan":
            raise LOST
        return ShutdownPlan(True, "saving step 8")

    def give_up(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.mark.parametrize("fails", ["the wait", "asking what is saved", "the plan", "the last save"])
def test_lost_process_has_one_outcome_when_leaving(fails: str) -> None:
    manager = LosingManager(fails)
    shutdown = GracefulShutdown(cast("StepManager", manager), Coordinator(), exit_code=0)

    def save() -> SaveResult:
        if fails == "asking what is saved":
            raise LOST
        return SaveResult(shutdown.has_time_to_save(8), "preemption")

    result = shutdown.finish(save)
    assert (result.saved, shutdown.outcome, manager.codes) == (False, Outcome.GIVEN_UP, [1])
    shutdown.decide()
    assert shutdown.preempted is not None
    assert (shutdown.preempted.exit_code, shutdown.preempted.step) == (1, 7)
