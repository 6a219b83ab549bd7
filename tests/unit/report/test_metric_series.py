"""Metrics by step: those of present and deleted steps, without those left behind by a rollback."""

from __future__ import annotations

import math
from pathlib import Path

import jaxckpt_train as jct
from tests.support.report_runs import gathered_of
from tests.support.runs import made_run, save_steps, state_of


def values(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = gathered_of(directory).metrics
    return {name: [(each.step, each.value) for each in series] for name, series in found.items()}


def test_metrics_of_deleted_steps_come_from_the_history(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        for step in (1, 2, 3):
            save_steps(manager, step, metrics={"loss": 1 / step, **({"rare": 7} if step == 2 else {})})
    assert values(tmp_path) == {"loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)], "rare": [(2, 7.0)]}


def test_attached_metrics_replace_those_of_save(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, metrics={"loss": 1.0, "accuracy": 0.1})
        manager.attach_metrics(1, {"accuracy": 0.9})
    assert values(tmp_path) == {"loss": [(1, 1.0)], "accuracy": [(1, 0.9)]}


def test_steps_left_behind_have_no_metrics(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        for step in (1, 2, 3):
            save_steps(manager, step, metrics={"loss": float(step)})
        manager.restore(step=1)
        save_steps(manager, 2, metrics={"loss": 20.0})
        save_steps(manager, 4, metrics={"loss": 40.0})
    assert values(tmp_path) == {"loss": [(1, 1.0), (2, 20.0), (4, 40.0)]}


def test_nonfinite_metrics_are_reported(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        manager.save(1, {"state": state_of(1)}, metrics={"loss": math.nan, "most": math.inf})
        manager.wait()
    found = values(tmp_path)
    assert math.isnan(found["loss"][0][1])
    assert found["most"] == [(1, math.inf)]


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert values(made_run(tmp_path, 1, 2)) == {}
