"""Proofs with killed processes: correct loops pass, and loops with one mistake are found."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.testing import ResumeNotExactError, ResumeProof, assert_resume_exact
from jaxckpt_train.testing.processes import How
from tests.support.tiers import nightly_after
from tests.support.training_loops import train, train_with_key


@pytest.mark.parametrize(("how", "resumed_at"), nightly_after(1, [("kill", (3, 6)), ("preempt", (4, 8))]))
def test_a_loop_that_resumes_exactly_is_proven(how: How, resumed_at: tuple[int, ...], tmp_path: Path) -> None:
    proof = assert_resume_exact(train, kill_at=[4, 8], how=how, directory=tmp_path / "proof")
    updates = sum(9 - step for step in resumed_at) - (9 - 8)
    assert proof == ResumeProof(9, (4, 8), resumed_at, updates, updates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ignored", [5, ["a", 5], [""], "", None, lambda name: True])
def test_invalid_ignored_metrics_are_refused(ignored: Any) -> None:
    with pytest.raises(SettingsError, match="resume proof: ignore_metrics: expected"):
        assert_resume_exact(train, kill_at=5, ignore_metrics=ignored)


MISTAKES: dict[str, tuple[Any, str, str]] = {
    "unseeded shuffle": (
        functools.partial(train, mistake="unseeded shuffle"),
        "update 1: its batch differs",
        "the run is not repeatable: the data is shuffled without a seed",
    ),
    "host generator": (
        functools.partial(train, mistake="host generator"),
        "update 4: loss differs",
        "the host's random generator: np.random is drawn from",
    ),
    "data not given": (
        functools.partial(train, mistake="data not given"),
        "update 4: loss differs",
        "the data is not passed to ckpt.resume",
    ),
    "key not in the state": (
        functools.partial(train_with_key, kept=False),
        "update 4: loss differs",
        "a PRNG key outside of the state",
    ),
    "optimizer left out": (
        functools.partial(train, mistake="optimizer left out"),
        "update 4: state/w float64[3] differs: [",
        "the optimizer state is not saved",
    ),
    "schedule": (
        functools.partial(train, mistake="schedule"),
        "update 4: state/w float64[3] differs: [",
        "a counter outside of the state, such as that of a learning-rate schedule",
    ),
    "not repeatable": (
        functools.partial(train, mistake="rounding"),
        "update 1: loss differs",
        "the run is not repeatable: operations of the device",
    ),
}


@pytest.mark.parametrize("mistake", nightly_after(1, MISTAKES))
def test_mistake_is_found_in_real_processes(mistake: str, tmp_path: Path) -> None:
    make_run, first, cause = MISTAKES[mistake]
    with pytest.raises(ResumeNotExactError) as caught:
        assert_resume_exact(make_run, kill_at=5, directory=tmp_path)
    assert str(caught.value).startswith(first)
    assert caught.value.causes[0].startswith(cause)
    assert f"  1. {cause}"[:100] in str(caught.value)
    assert "was killed (SIGKILL) in update 5" in str(caught.value)


def test_script_and_function_are_proven_without_jax(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        """
import sys
from pathlib import Path
import jaxckpt_train as jct

def train(directory):
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state = ckpt.resume({"w": 0})
        for _ in ckpt.steps(3):
            state = {"w": state["w"] + 1}
            ckpt(state)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        print(jct.testing.assert_resume_exact(train, kill_at=2))
        print(jct.testing.assert_resume_exact(["loop.py", "{directory}"], kill_at=2, how="preempt"))
        assert "jax" not in sys.modules
"""
    )
    done: subprocess.CompletedProcess[str] = run_python(tmp_path / "loop.py", cwd=tmp_path, check=True, fresh=True)
    assert done.stdout == f"{ResumeProof(3, (2,), (1,), 2, 0)}\n{ResumeProof(3, (2,), (2,), 1, 0)}\n"
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "__pycache__") == ["loop.py"]


def test_testing_module_needs_no_jax(run_python: Any) -> None:
    program = "import sys, jaxckpt_train as jct; jct.testing.assert_resume_exact; print('jax' in sys.modules)"
    assert run_python(program, check=True, fresh=True).stdout.split() == ["False"]
