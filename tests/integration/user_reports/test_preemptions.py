"""Problems of other checkpointers with repeated preemptions, and how these are reported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend, SlowBackend, callback_on
from tests.support.runs import Counter, made_run, state_of, step_of, step_path, talking_to
from tests.support.signal_handlers import WATCHED, handlers_put_back

FAST = jct.StoreSettings(durability="none")


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kinds(directory: Path) -> list[str]:
    return [event["event"] for event in jct.StepManager(directory).history.events()]


# 9. SIGTERM works inside an evaluation too, also without time for another save.
# 20. A skipped save is reported, even the last one.
def test_evaluation_without_time_leaves_committed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    disk = SlowBackend(12_004 / 0.5)
    ckpt = callback_on(disk, tmp_path, save_interval_steps=6, grace_period_s=1.0, exit_code=9)
    with pytest.raises(SystemExit) as left, ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            next(data)
            ckpt(state_of(step + 1))
            if step == 5:
                ckpt.wait_until_finished()
            if step == 7:
                send()
                assert ckpt.poll()
            assert step <= 7
    signal.signal(signal.SIGTERM, before)
    assert (left.value.code, seen) == (9, [signal.SIGTERM])
    manager = jct.StepManager(tmp_path)
    assert (manager.steps, step_of(manager.restore()), manager.restore()["data"]) == ([6], 6, {"position": 6})
    why = "keeping step 6: no time to save step 8"
    assert why in caplog.text
    assert why in next(event["plan"] for event in manager.history.events() if event["event"] == "preempted")
    (row,) = ckpt.summary(show=False).attempts
    assert (row.how, row.last_step) == ("late", 8)


# 21. 100 preemptions leave a bounded disk, and their cost is reported.
def test_hundred_preemptions_keep_one_step(tmp_path: Path) -> None:
    for number in range(100):
        ckpt = jct.CheckpointCallback(
            str(tmp_path),
            save_interval_steps=1000,
            keep_latest=1,
            on_preemption="raise",
            store=FAST,
            grace_period_s=60.0,
        )
        with pytest.raises(jct.Preempted) as left, ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(10_000):
                if step == 3 * number + 2:
                    send()
                ckpt(state_of(step + 1))
        assert left.value.step == 3 * number + 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "history.jsonl", "step-0000000300"]
    assert step_of(jct.StepManager(tmp_path).restore()) == 300
    found = ckpt.summary(show=False)
    assert (found.useful_steps, found.redone_steps, found.saves) == (300, 0, 100)
    assert [(each.how, each.first_step, each.useful_steps) for each in found.attempts] == [
        ("preempted", 3 * number, 3) for number in range(100)
    ]
    assert (tmp_path / "history.jsonl").stat().st_size < 100 * 2000


KILLED = """
import os, signal, sys
import jaxckpt_train as jct
from jaxckpt_train.run import history, lock
from tests.support.runs import state_of

lock.HEARTBEAT_S, history.LEAST_S, history.MOST_S = 0.02, 0.0, 0.0  # record the progress at once
with jct.CheckpointCallback(sys.argv[1], save_interval_steps=5, keep_latest=1) as ckpt:
    ckpt.resume(state_of(0))
    first = ckpt.completed_steps
    for step in ckpt.steps(10**6):
        ckpt(state_of(step + 1))
        if step + 1 == first + 5:
            ckpt.wait_until_finished()
        if step + 1 == first + 8:
            while not any(event.get("step") == first + 8 for event in ckpt.manager.history.events()):
                pass
            print("reached", first + 8, flush=True)
            sys.stdin.readline()
"""


def test_redone_work_after_kills_is_counted(tmp_path: Path) -> None:
    for number in range(2):
        with talking_to(KILLED, tmp_path) as job:
            assert job.read() == f"reached {10 * number + 8}"
            job.kill()
        ckpt = jct.CheckpointCallback(
            str(tmp_path), save_interval_steps=5, keep_latest=1, on_preemption="raise", store=FAST
        )
        with pytest.raises(jct.Preempted), ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(10**6):
                if step + 1 == 10 * number + 10:
                    send()
                ckpt(state_of(step + 1))
    found = ckpt.summary(show=False)
    assert [(each.how, each.useful_steps, each.redone_steps) for each in found.attempts] == [
        ("killed", 5, 3), ("preempted", 5, 0), ("killed", 5, 3), ("preempted", 5, 0),
    ]  # fmt: skip
    assert (found.useful_steps, found.redone_steps) == (20, 6)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".lock", "history.jsonl", "step-0000000020"]


# 22. Deletion is off the hot path, also at the exit.
def test_hanging_deletion_does_not_block_the_exit(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    disk = HoldingBackend("remove", "step-0000000001")
    ckpt = callback_on(disk, tmp_path, save_interval_steps=3, keep_latest=1, grace_period_s=2.0)
    with pytest.raises(SystemExit) as left, ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(50):
            if step == 4:
                assert disk.reached.wait(60)
                send()
            ckpt(state_of(step + 1))
            if step == 2:
                ckpt.wait_until_finished()
    assert left.value.code == 75
    assert jct.StepManager(tmp_path).latest == 5
    assert kinds(tmp_path)[-1] == "preempted"
    assert [each.how for each in jct.StepManager(tmp_path).goodput().attempts] == ["closed", "preempted"]
    assert {name for name in disk.threads if "retention" not in name} == set()
    disk.go.set()
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:  # waits for the deletion
        manager.save(6, {"state": state_of(6)})
        manager.wait()
    assert not step_path(tmp_path, 1).exists()


# 23. Blocking time is short and reported, also for all processes of a run.
def test_blocked_time_is_summed_over_the_run(tmp_path: Path) -> None:
    for updates in (2, 4):
        disk = HoldingBackend("rename", f"step-{updates - 1:010d}")
        ckpt = callback_on(disk, tmp_path, save_interval_steps=1)
        with ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(updates):
                if step == updates - 1:
                    threading.Timer(0.3, disk.go.set).start()  # the next save waits for the previous one
                ckpt(state_of(step + 1))
    events = [event for event in ckpt.manager.history.events() if event["event"] == "save"]
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    found = ckpt.summary(show=False)
    assert found.blocked_s == pytest.approx(sum(event["blocked_s"] for event in events))
    assert [row.blocked_s > 0.2 for row in found.attempts] == [True, True]
    assert all(row.useful_s <= row.wall_s - row.blocked_s for row in found.attempts)


# 29. One command starts, resumes or initialises, and the summary has each start.
def test_same_command_continues_and_reports_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jct.save(tmp_path / "elsewhere", state_of(77))

    def command(asked_at: int | None) -> dict[str, Any]:
        with jct.CheckpointCallback(
            str(tmp_path / "run"), init_from=str(tmp_path / "elsewhere"), save_initial=True, on_preemption="raise"
        ) as ckpt:
            state: dict[str, Any] = ckpt.resume(state_of(0))
            for step in ckpt.steps(8):
                if step + 1 == asked_at:
                    send()
                ckpt(state_of(step + 1))
        ckpt.summary()
        return state

    with pytest.raises(jct.Preempted):
        command(asked_at=5)
    assert step_of({"state": command(asked_at=None)}) == 5
    printed = capsys.readouterr().out
    assert printed.startswith("2 processes, useful time ")
    assert ("0-5" in printed, "5-8" in printed) == (True, True)
    rows = jct.StepManager(tmp_path / "run").goodput().attempts
    assert [(each.how, each.first_step, each.useful_steps, each.redone_steps) for each in rows] == [
        ("preempted", 0, 5, 0), ("finished", 5, 3, 0),
    ]  # fmt: skip
