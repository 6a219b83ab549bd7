"""The exit code and output of a campaign report its problems, and the parts that could not run."""

from __future__ import annotations

import time

import pytest

from tests.nightly.faults.campaign_end import MOST_SHOWN, leave_with, those_that_can
from tests.nightly.faults.needs import SKIPPED


@pytest.mark.parametrize(("count", "code"), [(0, 0), (1, 1), (256, 1)])  # an exit code has eight bits
def test_problems_are_counted_and_the_first_shown(count: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        leave_with([f"problem {number}" for number in range(count)], time.monotonic() - 5, 7)
    said = capsys.readouterr().out.splitlines()
    assert int(left.value.code or 0) == code
    assert said[0] == f"{count} problems; 5 s, seed 7"
    assert said[1:] == [f"  problem {number}" for number in range(min(count, MOST_SHOWN))]


def test_unrunnable_campaign_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert those_that_can(["ext4", "xfs"], {"xfs": "needs mkfs.xfs"}.get) == ["ext4"]
    assert capsys.readouterr().out == "xfs: SKIP: needs mkfs.xfs\n"


def test_campaign_without_runnable_parts_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        those_that_can(["ext4", "xfs"], lambda kind: f"no {kind}")
    assert left.value.code == SKIPPED
    assert capsys.readouterr().out == "ext4: SKIP: no ext4\nxfs: SKIP: no xfs\n"
