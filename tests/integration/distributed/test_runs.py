"""Runs of multi-process jobs: saved and resumed together, by the same or another number of processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.training import dataset, global_batch, happen, history, sink_events, start, train, train_step
from tests.support.tiers import nightly_after


def whole(job_of: JobOf, directory: Path, steps: int = 20) -> dict[str, Any]:
    """An uninterrupted training."""
    answers = job_of(4, 2).call(train, str(directory), steps, {"save_interval_steps": 1000})
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize(
    "options",
    nightly_after(
        1,
        [
            {"save_interval_steps": 3, "if_busy": "skip", "keep_latest": 2},
            {"save_interval_steps": 5},
            {"save_interval_secs": 0.01},
        ],
    ),
)
def test_resumed_run_continues_exactly(tmp_path: Path, job_of: JobOf, options: dict[str, Any]) -> None:
    straight = whole(job_of, tmp_path / "whole")
    run = str(tmp_path / "run")
    first = job_of(4, 2).call(train, run, 12, options)
    second = job_of(4, 2).call(train, run, 20, options)
    for before, after in zip(first, second, strict=True):
        assert after["started"] == 12
        assert before["losses"] + after["losses"] == straight["losses"]
        assert after["seen"] == straight["seen"]
    assert history(tmp_path / "run", "save")[-1]["step"] == 20


@pytest.mark.parametrize(
    ("request_by", "process"),
    [
        ({"signal": signal.SIGTERM}, 2),
        pytest.param({"signal": signal.SIGUSR1}, 0, marks=pytest.mark.nightly),
        pytest.param({"file": "leave"}, 2, marks=pytest.mark.nightly),
        pytest.param({"signal": signal.SIGTERM}, 0, marks=pytest.mark.nightly),
        pytest.param({"signal": signal.SIGUSR1}, 2, marks=pytest.mark.nightly),
        pytest.param({"file": "leave"}, 0, marks=pytest.mark.nightly),
    ],
)
def test_shutdown_request_to_one_stops_all_together(tmp_path: Path, request_by: dict[str, Any], process: int) -> None:
    if "file" in request_by:
        request_by = {"file": str(tmp_path / "leave")}
    options = {"notice_file": request_by.get("file"), "save_interval_steps": 1000, "keep_latest": 1}
    events = {"step": 40, "process": process, **request_by}
    with running(4, 2) as job:
        answers = job.call(train, str(tmp_path / "run"), 1_000_000, options, events)
        assert all(answer == answers[0] for answer in answers)
        step, code = answers[0]["preempted"]
        assert code == 75
        assert step == len(answers[0]["losses"]) >= 40
        assert jct.StepManager(tmp_path / "run").steps == [step]
        assert [each["step"] for each in history(tmp_path / "run", "preempted")] == [step]
    if "file" in request_by:
        (tmp_path / "leave").unlink()
    with running(2, 4) as job:
        again = job.call(train, str(tmp_path / "run"), step + 3, options)
        straight = job.call(train, str(tmp_path / "whole"), step + 3, {"save_interval_steps": 10_000})
    assert again[0]["started"] == step
    assert answers[0]["losses"] + again[0]["losses"] == straight[0]["losses"]
    assert again[0]["seen"] == straight[0]["seen"]


def leave_by_exit(directory: str) -> str:
    """Return how the loop ends with `on_preemption="exit"`."""
    events = {"step": 5, "process": 1, "signal": signal.SIGTERM}
    try:
        with jct.CheckpointCallback(directory, on_preemption="exit") as ckpt:
            state, data = ckpt.resume(start(), iter(dataset(10_000)))
            for step in ckpt.steps(1_000_000):
                state, _ = train_step(state, global_batch(data))
                happen(events, step + 1)
                ckpt(state)
    except SystemExit as leaving:
        return f"{leaving.code} at {ckpt.completed_steps}, {ckpt.manager.steps}"
    return "went on"


def test_all_leave_with_the_same_code(tmp_path: Path) -> None:
    with running(2, 2) as job:
        answers = job.call(leave_by_exit, str(tmp_path / "run"))
    assert answers[0] == answers[1]
    assert answers[0].startswith("75 at ")


class Reluctant:
    """A user's policy that chooses other steps in process 0 than elsewhere."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return bool(step.step % (3 if jax.process_index() == 0 else 4) == 0)


def saved_by_policy(directory: str, which: str) -> list[Any]:
    policies: dict[str, Any] = {
        "user": Reluctant(),
        "improvement": jct.ImprovementPolicy("loss", "min"),
        "all": jct.AllSavePolicy([jct.FixedIntervalPolicy(4), jct.EverySecondsPolicy(1e-6)]),
        "any": jct.AnySavePolicy([jct.FixedIntervalPolicy(5), jct.EverySecondsPolicy(1000)]),
        "initial": jct.AnySavePolicy([jct.InitialSavePolicy(), jct.SpecificStepsPolicy([7])]),
        "continuous": jct.ContinuousCheckpointingPolicy(),
    }
    state, saved = start(), []
    with jct.StepManager(directory, save_decision_policy=policies[which]) as manager:
        for step in range(1, 13):
            # Only what process 0 measures counts.
            loss = abs(step - 6) + (0 if jax.process_index() == 0 else 100 - 2 * step)
            result = manager.save(step, {"state": state}, metrics={"loss": loss})
            saved += [step] if result.saved else []
            if which == "continuous":
                manager.wait()
        manager.wait()
        assert manager.steps == saved
        assert manager.latest == saved[-1]
        assert manager.is_committed(saved[0])
        assert not manager.is_committed(99)
        assert manager.best("loss") == (6 if 6 in saved else manager.best("loss"))
    return saved


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("user", [3, 6, 9, 12]),
        ("improvement", [1, 2, 3, 4, 5, 6]),
        ("all", [4, 8, 12]),
        ("any", [5, 10]),
        ("initial", [1, 7]),
        ("continuous", None),
    ],
)
def test_all_decide_as_process_0_does(tmp_path: Path, job_of: JobOf, which: str, expected: list[int] | None) -> None:
    answers = job_of(4, 1).call(saved_by_policy, str(tmp_path / "run"), which)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == expected if expected else len(answers[0]) > 1
    assert jct.StepManager(tmp_path / "run").steps == answers[0]


def test_only_the_first_process_has_events_for_sinks(tmp_path: Path, job_of: JobOf) -> None:
    events = job_of(4, 2).call(sink_events, str(tmp_path / "run"))
    assert [each for each in events[0] if each[0] in ("save", "restore")] == [["save", 1], ["restore", 1]]
    assert events[1:] == [[], [], []]


def test_history_records_bytes_of_all_processes(tmp_path: Path, job_of: JobOf) -> None:
    job_of(4, 2).call(sink_events, str(tmp_path / "run"))
    (save,) = history(tmp_path / "run", "save")
    step = tmp_path / "run" / save["name"]
    assert save["bytes"] == sum(file.stat().st_size for file in step.glob("*/*")) == jct.metadata(step).bytes
