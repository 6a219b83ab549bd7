"""Which pairs of steps are compared, and how far leaves moved between them, against numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection.runs import inspect_run
from jaxckpt_train.report import changes
from jaxckpt_train.report.changes import Changes, compare, plan_changes
from tests.support.report_runs import BACKEND
from tests.support.runs import flip_a_payload_byte, made_run, step_path, truncate_the_manifest


def run_of(directory: Path, **trees: Any) -> Path:
    with jct.StepManager(directory) as manager:
        for name, tree in trees.items():
            manager.save(int(name[1:]), {"state": tree})
            manager.wait()
    return directory


def compared(directory: Path, requested: int | None = None) -> Changes:
    plan = plan_changes(inspect_run(BACKEND, str(directory)), requested)
    return compare(BACKEND, str(directory), plan, lambda nbytes: None)


def pairs(directory: Path, requested: int | None) -> list[tuple[int, int]]:
    plan = plan_changes(inspect_run(BACKEND, str(directory)), requested)
    return [(before.step, after.step) for before, after in plan.pairs]


def test_relative_change_is_a_ratio_of_norms(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    one, other = (rng.normal(size=(50, 40)).astype(np.float32) for _ in range(2))
    still = np.arange(5.0)
    run_of(
        tmp_path,
        s1={"a": one, "b": {"c": still, "n": 3}, "d": np.zeros(4)},
        s2={"a": other, "b": {"c": still, "n": 4}, "d": np.ones(4)},
    )
    ((pair,), left_out) = (compared(tmp_path).pairs, compared(tmp_path).left_out)
    assert (pair.before, pair.after, pair.equal, pair.problem, left_out) == (1, 2, 1, "", "")
    found = {leaf.name: leaf for leaf in pair.leaves}
    assert list(found) == ["state/a", "state/b/n", "state/d"]
    assert found["state/a"].relative == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one), rel=1e-5)
    assert found["state/a"].max_abs == pytest.approx(np.abs(other - one).max(), rel=1e-6)
    assert (found["state/a"].differing, found["state/a"].count) == (2000, 2000)
    assert found["state/b/n"].relative is None
    assert found["state/d"].relative == math.inf
    whole = math.sqrt(np.linalg.norm(other - one) ** 2 + 4) / np.linalg.norm(one)
    assert pair.relative == pytest.approx(whole, rel=1e-5)


def test_leaves_that_only_one_has_are_reported(tmp_path: Path) -> None:
    run_of(tmp_path, s1={"a": np.ones(2), "b": np.ones(3)}, s2={"a": np.ones((1, 2)), "c": np.ones(3)})
    (pair,) = compared(tmp_path).pairs
    assert {leaf.name: leaf.kind for leaf in pair.leaves} == {
        "state/a": "form", "state/b": "only_a", "state/c": "only_b"
    }  # fmt: skip
    assert pair.relative is None


@pytest.mark.parametrize(
    ("requested", "chosen", "left_out"),
    [
        (None, [(2, 3), (3, 4), (4, 5), (5, 6)], "1 of 5 pairs"),
        (2, [(4, 5), (5, 6)], "3 of 5 pairs"),
        (0, [], "5 of 5 pairs"),
        (9, [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)], ""),
    ],
)
def test_newest_pairs_are_chosen_rest_is_reported(
    tmp_path: Path, requested: int | None, chosen: list[tuple[int, int]], left_out: str
) -> None:
    made_run(tmp_path, 1, 2, 3, 4, 5, 6)
    assert pairs(tmp_path, requested) == chosen
    assert compared(tmp_path, requested).left_out.startswith(left_out)
    assert bool(compared(tmp_path, requested).left_out) == bool(left_out)


def test_default_comparison_reads_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path, 1, 2, 3)
    size = inspect_run(BACKEND, str(tmp_path))[0].nbytes
    assert size is not None
    monkeypatch.setattr(changes, "FEW_BYTES", 2 * size)
    assert pairs(tmp_path, None) == [(2, 3)]
    monkeypatch.setattr(changes, "FEW_BYTES", 2 * size - 1)
    assert pairs(tmp_path, None) == []
    left_out = compared(tmp_path).left_out
    assert left_out.startswith("2 of 2 pairs")
    assert "`--changes 2`" in left_out
    assert pairs(tmp_path, 2) == [(1, 2), (2, 3)]


def test_steps_that_cannot_be_restored_are_passed_over(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    truncate_the_manifest(step_path(tmp_path, 2))
    assert pairs(tmp_path, None) == [(1, 3)]


def test_damaged_pair_does_not_stop_the_others(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    flip_a_payload_byte(step_path(tmp_path, 1))
    first, second = compared(tmp_path).pairs
    assert "step-0000000001" in first.problem
    assert (first.leaves, second.problem, len(second.leaves)) == ((), "", 2)


def test_one_step_has_no_pair(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    assert compared(tmp_path) == Changes((), "")
