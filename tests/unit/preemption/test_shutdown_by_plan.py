"""A signal and a slow disk: the last save is started only if it can finish in time."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import SlowBackend, callback_on
from tests.support.interrupts import once_waiting
from tests.support.metadata_servers import until
from tests.support.runs import Counter, state_of, step_of
from tests.support.signal_handlers import WATCHED, handlers_put_back

pytestmark = pytest.mark.timeout(120)

STATE_BYTES = 12_004
SAVED_AT = 6  # by then it is known how long an update takes


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Loop:
    """A loop that gets a signal in the middle of an update, on a disk where a save takes `save_s` seconds."""

    def __init__(self, directory: Path, save_s: float, *, held: int | None = None, **options: Any) -> None:
        part = "" if held is None else f"step-{held:010d}"
        self.directory, self.disk = directory, SlowBackend(STATE_BYTES / save_s, "rename" if part else "", part)
        self.ckpt = callback_on(self.disk, directory, **{"save_interval_steps": SAVED_AT, **options})

    def run(self, asked_at: int, *, waits_after: int = SAVED_AT) -> None:
        """Train until the shutdown, and wait for the save of step `waits_after`."""
        with self.ckpt as ckpt:
            _, data = ckpt.resume(state_of(0), Counter())
            for step in ckpt.steps(1000):
                assert next(data) == step
                assert step < asked_at
                if step == asked_at - 1:
                    self.is_asked()
                ckpt(state_of(step + 1))
                if step + 1 == waits_after:
                    ckpt.wait_until_finished()

    def is_asked(self) -> None:
        send()
        once_waiting(self.disk.go.set)  # the disk is fast from then on

    def history(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in jct.StepManager(self.directory).history.events() if each["event"] == kind]

    def plan(self) -> str:
        (event,) = self.history("preempted")
        return str(event["plan"])

    def check_saved(self, *steps: int) -> None:
        """Check that the run has exactly these steps, the last one with its position in the data."""
        manager = jct.StepManager(self.directory)
        assert manager.steps == [*steps]
        restored = manager.restore({"state": state_of(0), "data": Counter()})
        assert (step_of(restored), restored["data"].position) == (steps[-1], steps[-1])


def test_save_that_fits_is_made(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.3, grace_period_s=30.0)
    with pytest.raises(SystemExit) as left:
        loop.run(9)
    assert left.value.code == 75
    loop.check_saved(6, 9)
    assert loop.plan().startswith("saving step 9: ")
    assert loop.plan().endswith(" are needed")
    assert loop.history("preempted")[0]["step"] == 9
    (end,) = loop.history("end")
    assert (end["how"], end["step"]) == ("preempted", 9)


def test_save_that_cannot_finish_is_not_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, 0.5, grace_period_s=1.0, exit_code=13)
    with pytest.raises(SystemExit) as left:
        loop.run(9)
    assert left.value.code == 13
    assert not any("step-0000000009" in name for name in loop.disk.written)
    loop.check_saved(6)
    assert loop.plan().startswith("keeping step 6: no time")
    assert f"shutting down: {loop.plan()}" in caplog.messages
    assert any("step 6 is saved" in message for message in caplog.messages)
    (event,), (end,) = loop.history("preempted"), loop.history("end")
    assert (event["step"], end["how"], end["step"]) == (6, "late", 9)
    assert loop.ckpt.manager._save_slot.given_up is None
    (row,) = loop.ckpt.summary(show=False).attempts
    assert (row.how, row.last_step) == ("late", 9)


def test_skipped_save_never_exits_with_zero(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.5, grace_period_s=1.0, exit_code=0, on_preemption="raise")
    with pytest.raises(jct.Preempted, match="step 6 is saved") as left:
        loop.run(9)
    assert (left.value.step, left.value.exit_code) == (6, 1)


def test_plan_uses_costs_of_earlier_process(tmp_path: Path) -> None:
    first = Loop(tmp_path, 0.5)
    with pytest.raises(SystemExit):
        first.run(7)
    first.check_saved(6, 7)
    second = Loop(tmp_path, 0.001, grace_period_s=1.0)
    with pytest.raises(SystemExit), second.ckpt as ckpt:
        ckpt.resume(state_of(0), Counter())
        ckpt(state_of(8), step=8)
        send()
        ckpt(state_of(9), step=9)
    assert "no time to save step 9" in second.history("preempted")[1]["plan"]
    assert jct.StepManager(tmp_path).steps == [6, 7]
    with pytest.raises(SystemExit), Loop(tmp_path, 0.001).ckpt as ckpt:  # without a limit
        ckpt.resume(state_of(0), Counter())
        send()
        ckpt(state_of(8), step=8)
    assert jct.StepManager(tmp_path).steps == [6, 7, 8]


def test_running_save_is_followed_by_another(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.2, held=12, grace_period_s=60.0)
    with pytest.raises(SystemExit) as left:
        loop.run(13)
    assert left.value.code == 75
    loop.check_saved(6, 12, 13)
    assert loop.plan().startswith("saving step 13: ")
    assert loop.history("end")[0]["how"] == "preempted"


class LaterLoop(Loop):
    """A loop that is asked to leave when the running save has taken a second already, longer than the first one."""

    def is_asked(self) -> None:
        self.disk.go.wait(1.0)
        super().is_asked()


def test_slow_running_save_rules_out_another(tmp_path: Path) -> None:
    loop = LaterLoop(tmp_path, 0.2, held=12, grace_period_s=2.0)
    with pytest.raises(SystemExit) as left:
        loop.run(14)
    assert left.value.code == 75
    loop.check_saved(6, 12)
    assert loop.plan().startswith("keeping step 12: ")
    assert not any("step-0000000014" in name for name in loop.disk.written)
    assert loop.history("end")[0]["how"] == "late"


class StuckLoop(Loop):
    """A loop whose disk does not answer when it is asked to leave."""

    def is_asked(self) -> None:
        send()


def test_last_update_is_counted_when_running_save_is_given_up(tmp_path: Path) -> None:
    loop = StuckLoop(tmp_path, 0.2, held=12, grace_period_s=1.0)
    with pytest.raises(SystemExit):
        loop.run(14)
    given_up = loop.ckpt.manager._save_slot.given_up
    assert given_up is not None
    loop.disk.go.set()
    given_up.wait(60)
    until(lambda: loop.history("end"))  # written when the save has ended
    (end,) = loop.history("end")
    assert (end["how"], end["step"]) == ("late", 14)


def test_save_of_unknown_duration_is_tried(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.2, grace_period_s=30.0)
    with pytest.raises(SystemExit):
        loop.run(3)
    loop.check_saved(3)
    assert loop.plan().startswith("saving step 3: ")


def test_shutdown_without_limit_saves_everything(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.5, held=12)
    with pytest.raises(SystemExit):
        loop.run(13)
    loop.check_saved(6, 12, 13)
    assert loop.plan().startswith("saving step 13: ")


@pytest.mark.parametrize("noticed_by", ["call", "poll", "the end of the loop"])
def test_shutdown_choice_is_reported_once(tmp_path: Path, noticed_by: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jaxckpt_train")
    loop = Loop(tmp_path, 0.5, grace_period_s=1.0, on_preemption="raise")
    with pytest.raises(jct.Preempted) as left, loop.ckpt as ckpt:
        ckpt.resume(state_of(0), Counter())
        for step in range(1, 10):
            if step == 9 and noticed_by == "call":
                send()
            ckpt(state_of(step))
            if step == 6:
                ckpt.wait_until_finished()
        send()
        if noticed_by == "poll":
            assert ckpt.poll()  # outside `steps` it saves nothing
            ckpt(state_of(10))
    asked_at = 10 if noticed_by == "poll" else 9
    assert left.value.step == 6
    assert jct.StepManager(tmp_path).steps == [6]
    assert f"no time to save step {asked_at}" in loop.plan()
    assert [each["how"] for each in loop.history("end")] == ["late"]
    assert loop.history("end")[0]["step"] == asked_at


def test_failed_running_save_is_followed_by_another(tmp_path: Path) -> None:
    class Refusing(SlowBackend):
        def rename(self, source: str, target: str) -> None:
            self._pass("rename", target)
            if self._part in target:
                raise jct.StorageError(errno.EIO, "refused", target)
            super().rename(source, target)

    loop = Loop(tmp_path, 0.2)
    loop.disk = Refusing(STATE_BYTES / 0.2, "rename", "step-0000000012")
    loop.ckpt = callback_on(loop.disk, tmp_path, save_interval_steps=SAVED_AT, grace_period_s=60.0)
    with pytest.raises(SystemExit):
        loop.run(13)
    loop.check_saved(6, 13)
    assert [(each["step"], each["ok"]) for each in loop.history("save")] == [(6, True), (12, False), (13, True)]
    assert loop.plan().startswith("saving step 13: ")


def run_to(ckpt: jct.CheckpointCallback, seconds: float) -> None:
    """Let `seconds` of the time limit pass."""
    limit = ckpt._shutdown._limit
    assert limit is not None
    limit._monotonic = lambda: limit._began_at + seconds


def test_lead_time_follows_measured_saves(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.5, max_run_time_s=100.0)
    with pytest.raises(SystemExit), loop.ckpt as ckpt:
        ckpt.resume(state_of(0), Counter())
        for step in range(1, 20):
            seconds = 69.0 if step <= 6 else 85.0 if step <= 9 else 95.0  # 30 s early, and then less
            run_to(ckpt, seconds)
            ckpt(state_of(step))
            if step == 6:
                ckpt.wait_until_finished()
    assert jct.StepManager(tmp_path).latest == 10
    assert loop.history("preempted")[0]["reason"] == "the time limit of 100 s"
    again = Loop(tmp_path, 0.001, max_run_time_s=100.0)  # it knows the duration of saves from the history
    with pytest.raises(SystemExit), again.ckpt as ckpt:
        ckpt.resume(state_of(0), Counter())
        run_to(ckpt, 85.0)
        ckpt(state_of(11), step=11)
        run_to(ckpt, 95.0)
        ckpt(state_of(12), step=12)


def test_default_lead_time_is_thirty_seconds(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0.001, max_run_time_s=100.0)
    with pytest.raises(SystemExit), loop.ckpt as ckpt:
        ckpt.resume(state_of(0), Counter())
        run_to(ckpt, 69.0)
        ckpt(state_of(1))
        run_to(ckpt, 70.5)
        ckpt(state_of(2))
    assert jct.StepManager(tmp_path).steps == [2]


@pytest.mark.parametrize("limit_s", [31.0, 20.0, 1.0])
def test_unknown_costs_halve_short_time_limit(tmp_path: Path, limit_s: float) -> None:
    loop = Loop(tmp_path, 0.001, max_run_time_s=limit_s)
    with pytest.raises(SystemExit) as left, loop.ckpt as ckpt:
        run_to(ckpt, 0.0)
        ckpt.resume(state_of(0), Counter())
        run_to(ckpt, 0.49 * limit_s)
        ckpt(state_of(1))
        run_to(ckpt, 0.51 * limit_s)
        ckpt(state_of(2))
    assert left.value.code == 75
    assert jct.StepManager(tmp_path).steps == [2]
    assert loop.history("preempted")[0]["reason"] == f"the time limit of {limit_s:g} s"
