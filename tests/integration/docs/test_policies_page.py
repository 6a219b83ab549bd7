"""The reasons that docs/reference/policies.md shows are those that policies write into the history."""

from __future__ import annotations

import pytest

import jaxckpt_train as jct
from benchmarks.goodput_model import SimulatedRun, Training, failure_times
from benchmarks.tuned_scenes import MTBF_S, NEVER_S, USUAL
from jaxckpt_train.policies.context import SavePolicy
from tests.support.pages import pages

SHORT = Training(step_s=0.5, blocked_s=0.0002, save_s=0.01, slower=1.0)


@pytest.fixture(scope="module")
def reasons() -> list[str]:
    """The lines of the page."""
    (page,) = (page for page in pages() if page.name == "docs/reference/policies.md")
    (found,) = (block.text.splitlines() for block in page.blocks("") if "the first save" in block.text)
    return found


def reasons_of(training: Training, policy: SavePolicy, steps: int) -> tuple[str, ...]:
    return SimulatedRun(training, policy, failure_times(NEVER_S, 1)).run(steps).reasons


def test_the_reasons_are_those_that_policies_give(reasons: list[str]) -> None:
    given = {*reasons_of(USUAL, jct.OverheadBudgetPolicy(0.035), 500)}
    given |= {*reasons_of(USUAL, jct.YoungDalyPolicy(MTBF_S), 200)}
    given |= {*reasons_of(SHORT, jct.OverheadBudgetPolicy(0.035), 200)}
    assert [reason for reason in reasons if reason not in given] == []
    assert len(reasons) == 4
