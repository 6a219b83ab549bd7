"""Several sources of a run: a failing one disturbs neither the others nor the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.runs import state_of


class Source:
    """A source that returns a notice or fails."""

    def __init__(self, found: Any = None) -> None:
        self.found, self.asked = found, 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def notice(self) -> Any:
        self.asked += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def step_left_at(directory: Path, first: Source, second: Source) -> int | None:
    """Return the step at which a training shuts down; its second source has a notice in update 6."""
    ckpt = jct.CheckpointCallback(directory, notices=[first, second], on_preemption="raise", progress=False)
    with pytest.raises(jct.Preempted) as left, ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(100):
            second.found = "it is over" if step == 5 else None
            ckpt(state_of(step + 1))
    return left.value.step


def test_failing_source_does_not_hide_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Source(ValueError("no such cloud")), Source()
    assert step_left_at(tmp_path, failing, other) == 6
    assert failing.asked > 6
    assert caplog.text.count("Source: asking it for a notice failed") == 1
    assert "no such cloud" in caplog.text


class Wrong(Source):
    """A source whose notice is computed, and may be invalid."""

    def notice(self) -> Any:
        self.asked += 1
        return self.found()


@pytest.mark.parametrize(
    ("makes", "said"),
    [
        (lambda: jct.Notice("the cluster", leave_by="y"), "Notice.leave_by: expected seconds of time.monotonic()"),  # type: ignore[arg-type]
        (lambda: jct.Notice("the cluster", asked_at=float("nan")), "Notice.asked_at: expected seconds of"),
        (lambda: jct.Notice(5), "Notice.reason: expected text, found 5"),  # type: ignore[arg-type]
        (lambda: 0, "Wrong.notice(): expected a Notice"),
    ],
)
def test_wrong_notice_is_logged_once(tmp_path: Path, makes: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong, other = Wrong(makes), Source()
    assert step_left_at(tmp_path, wrong, other) == 6
    assert wrong.asked > 6
    assert caplog.text.count("Wrong: asking it for a notice failed") == 1
    assert said in caplog.text


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_source_may_return_a_truth_value(tmp_path: Path, kind: Any) -> None:
    steps = iter([kind(False)] * 5)
    source = Wrong(lambda: next(steps, kind(True)))
    ckpt = jct.CheckpointCallback(tmp_path, notices=[source], on_preemption="raise", progress=False)
    with pytest.raises(jct.Preempted) as left, ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(100):
            ckpt(state_of(step + 1))
    assert left.value.step < 10
    assert "Wrong" in str(left.value)


@pytest.mark.parametrize("number", [np.float32(5), np.int64(5), 5])
def test_notice_takes_times_of_numpy(number: Any) -> None:
    assert jct.Notice("the cluster", asked_at=number, leave_by=number).leave_by == 5
