"""benchmarks.overhead_budget: a short real run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cost_process import run_fresh
from benchmarks.lm_training import QUICK


def test_blocks_with_and_without_saves_of_real_training(tmp_path: Path) -> None:
    given = {"size": dict(QUICK), "directory": str(tmp_path), "block_s": 0.7, "pairs": 1}
    answer = run_fresh("benchmarks.overhead_training:pairs_in_child", given)
    assert [len(answer["bare"]), len(answer["saving"])] == [2, 1]
    assert all(block["updates"] > 0 for block in answer["bare"] + answer["saving"])
    assert sum(block["saves"] for block in answer["saving"]) == len(answer["saves"]) >= 1
    assert all(save["lasted_s"] > 0 for save in answer["saves"])
    assert answer["costs"]["spent_s"] != 0
    trained_s = sum(block["wall_s"] for block in answer["saving"])
    assert answer["costs"]["trained_s"] + answer["costs"]["spent_s"] <= trained_s + 0.1
