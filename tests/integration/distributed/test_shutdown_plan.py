"""A job that is asked to shut down: the measurements of process 0 decide for all, and lost time is reported."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import SlowBackend, callback_on
from tests.support.interrupts import once_waiting
from tests.support.jobs.job import Job, running
from tests.support.jobs.training import dataset, global_batch, happen, history, start, train_step

HELD = 12


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with running(2, 1, preemption_service=False) as joined:
        yield joined


def leave(directory: str, knows: dict[str, float], grace_period_s: float | None) -> list[Any]:
    """Train until process 1 gets a signal, and return the outcome in this process.

    `knows` has the seconds that process 0 measured for a `save`, and whether the running save `ends` before the signal.
    Process 1 measured another value.
    """
    disk = SlowBackend(1e9, "rename", f"step-{HELD:010d}")
    policy = jct.SpecificStepsPolicy([6, HELD])
    options: dict[str, Any] = {"save_interval_steps": None, "save_policy": policy, "on_preemption": "raise"}
    ckpt = callback_on(disk, directory, grace_period_s=grace_period_s, **options)
    clock, is_first = ckpt.manager._save_scheduler.clock, jax.process_index() == 0
    begun = []
    try:
        with ckpt:
            state, data = ckpt.resume(start(), iter(dataset(10_000)))
            for step in ckpt.steps(1_000_000):
                state, _ = train_step(state, global_batch(data))
                if step == 7:
                    clock.committed(knows["save"] if is_first else 0.001)
                if step == HELD and is_first:
                    once_waiting(disk.go.set)
                happen({"step": HELD + 1, "process": 1, "signal": signal.SIGTERM}, step + 1)
                begun += [step + 1] if ckpt(state).saved else []
                if step + 1 == HELD and knows.get("ends"):
                    disk.go.set()
                    ckpt.wait_until_finished()
    except jct.Preempted as error:
        return [error.step, error.exit_code, ckpt.completed_steps, begun, ckpt.manager.steps]
    raise AssertionError("it was not asked to leave")


def alike(answers: list[Any]) -> list[Any]:
    assert answers[0] == answers[1]
    return list(answers[0])


def test_save_without_enough_time_is_not_started(tmp_path: Path, job: Job) -> None:
    answers = job.call(leave, str(tmp_path), {"save": 100.0, "ends": 1.0}, 30.0)
    saved, code, completed, begun, steps = alike(answers)
    assert (saved, code, begun, steps) == (HELD, 75, [6, HELD], [6, HELD])
    (event,) = history(tmp_path, "preempted")
    assert event["plan"].startswith(f"keeping step {HELD}: ")
    assert f"step {completed}," in event["plan"]
    (end,) = history(tmp_path, "end")
    assert (end["how"], end["step"], event["step"]) == ("late", completed, HELD)


@pytest.mark.parametrize(
    ("knows", "grace_period_s"),
    [({"save": 0.5}, 60.0), ({"save": 0.5}, None), ({"save": 0.5, "ends": 1.0}, 60.0)],
)
def test_with_time_all_save_same_last_update(
    tmp_path: Path, job: Job, knows: dict[str, float], grace_period_s: float | None
) -> None:
    saved, code, completed, _, steps = alike(job.call(leave, str(tmp_path), knows, grace_period_s))
    assert (saved, code, steps) == (completed, 75, [6, HELD, completed])
    (event,) = history(tmp_path, "preempted")
    assert f"saving step {completed}" in event["plan"]
    assert history(tmp_path, "end")[0]["how"] == "preempted"


def leave_by_the_limit(directory: str) -> list[Any]:
    """Train with different clocks: half of the time limit has passed in process 1, but not yet in process 0."""
    disk = SlowBackend(1e9)
    ckpt = callback_on(disk, directory, save_interval_steps=None, max_run_time_s=31.0, on_preemption="raise")
    limit, passed_s = ckpt._shutdown._limit, [0.0]
    assert limit is not None
    limit._monotonic = lambda: limit._began_at + passed_s[0]
    try:
        with ckpt:
            state, data = ckpt.resume(start(), iter(dataset(10_000)))
            for step in ckpt.steps(1_000_000):
                state, _ = train_step(state, global_batch(data))
                passed_s[0] = 15.0 if step < HELD or jax.process_index() == 0 else 16.0
                ckpt(state)
    except jct.Preempted as error:
        return [error.step, error.exit_code, ckpt.completed_steps, ckpt.manager.steps]
    raise AssertionError("its time was not up")


def test_short_time_limit_of_one_stops_all(tmp_path: Path, job: Job) -> None:
    saved, code, completed, steps = alike(job.call(leave_by_the_limit, str(tmp_path)))
    assert (saved, code, steps) == (completed, 75, [completed])
    assert completed > HELD


def records(directory: str) -> list[Any]:
    """Return the first line that this process prints, and the attempts in its summary."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), jct.CheckpointCallback(directory, save_interval_steps=100) as ckpt:
        state, data = ckpt.resume(start(), iter(dataset(10_000)))
        for _ in ckpt.steps(40):
            state, _ = train_step(state, global_batch(data))
            ckpt(state)
        during = ckpt.summary()
    rows = [[each.how, each.first_step, each.useful_steps, each.redone_steps] for each in during.attempts]
    return [printed.getvalue().splitlines()[:1], rows]


def test_process_0_reports_lost_time_and_all_know(tmp_path: Path, job: Job) -> None:
    _, _, completed, *_ = alike(job.call(leave, str(tmp_path), {"save": 100.0, "ends": 1.0}, 30.0))
    first, second = job.call(records, str(tmp_path))
    lost = completed - HELD
    assert first[1] == [["late", 0, HELD, lost], ["running", HELD, 40 - HELD, 0]]
    assert [row[0] for row in second[1]] == ["late", "running"]  # the running attempt as process 0 reported it
    assert first[0][0].startswith("2 processes, useful time ")
    assert second[0] == []
    (again, _) = job.call(records, str(tmp_path))
    assert again[1][-2:] == [["finished", HELD, 40 - HELD, 0], ["running", 40, 0, 0]]
    assert len(history(tmp_path, "start")) == len(history(tmp_path, "resumed")) == 3
