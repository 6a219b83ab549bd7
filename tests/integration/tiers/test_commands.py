"""What `jaxckpt` shows of a run with a fast tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.report.page import page_of
from tests.support.report_runs import gathered_of


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that failed at step 17, and continued until step 18, with a step of its own on each tier."""
    folder = tmp_path_factory.mktemp("tiers")
    tier = {"directory": folder / "fast", "interval_steps": 2}
    for last in (17, 18):
        with jct.CheckpointCallback(folder / "slow", save_interval_steps=10, fast_tier=tier) as ckpt:
            state = ckpt.resume({"w": np.zeros(1000)})
            for step in ckpt.steps(19):
                if step == last:
                    break
                state = {"w": state["w"] + 1}
                ckpt(state, metrics={"loss": 1 / (step + 1)})
            ckpt.wait_until_finished()
    return folder


def test_report_shows_both_tiers(failed: Path) -> None:
    gathered = gathered_of(failed / "slow")
    assert {save.tier for save in gathered.saves} == {"fast"}
    assert [drain.step for drain in gathered.drains][:2] == [10, 16]
    assert {life.state for life in gathered.steps} == {"kept"}
    assert {life.step for life in gathered.steps} == {drain.step for drain in gathered.drains}
    assert [value.step for value in gathered.metrics["loss"]] == [*range(2, 19, 2)]
    (restore,) = gathered.restores
    assert (restore.step, restore.tier, restore.ahead_steps) == (16, "fast", 6)


def test_page_says_what_the_fast_tier_saved(failed: Path) -> None:
    page = page_of(gathered_of(failed / "slow"))
    assert "6 updates" in page
    assert "Copies to the run directory." in page
