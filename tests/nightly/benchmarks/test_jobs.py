"""Jobs of workers: a library that returns other bytes is caught."""

from __future__ import annotations

from pathlib import Path

from benchmarks.leaf import Leaf
from benchmarks.rounds import Plan, run_rounds
from benchmarks.workloads import Workload
from tests.support.fake_subjects import DYING_IN_ONE, HONEST_IN_JOB, WRONG_IN_ONE

TINY_JOB = Workload(
    "tiny_job", (Leaf(("params", "a"), (8, 16), spec=("x",)), Leaf(("params", "b"), (6,))), (2, 1), processes=2
)


def test_honest_library_passes_others_are_caught(tmp_path: Path) -> None:
    plan = Plan(counted_rounds=1, seed=1, fresh_loads=False, report=lambda line: None)
    outcome = run_rounds(TINY_JOB, [HONEST_IN_JOB, WRONG_IN_ONE, DYING_IN_ONE], tmp_path, plan)
    assert [(turn.round, turn.subject) for turn in outcome.turns] == [(0, HONEST_IN_JOB), (1, HONEST_IN_JOB)]
    assert "leaf params/a: 1 of 256 bytes differ" in outcome.failed[WRONG_IN_ONE]
    assert "the worker died" in outcome.failed[DYING_IN_ONE]
