"""The text of one difference: the leaf, and both values with enough digits to distinguish them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing import ResumeNotExactError
from tests.support.in_one_process import prove_here


def first_lines(make_run: Any, directory: Path) -> list[str]:
    with pytest.raises(ResumeNotExactError) as caught:
        prove_here(make_run, directory, 2)
    return str(caught.value).splitlines()


def becomes(straight: Any, resumed: Any, metrics: tuple[Any, Any], directory: Path) -> None:
    """A loop whose leaf `x` and metrics after its third update depend on whether it was interrupted."""
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state = ckpt.resume({"x": straight, "step": 0})
        was_resumed = ckpt.completed_steps > 0
        for step in ckpt.steps(3):
            last = step == 2 and was_resumed
            state = {"x": resumed if last else straight, "step": step + 1}
            ckpt(state, metrics=metrics[last])


def described(straight: Any, resumed: Any, directory: Path, metrics: tuple[Any, Any] = (None, None)) -> str:
    return first_lines(functools.partial(becomes, straight, resumed, metrics), directory / "proof")[0]


WIDE = np.arange(200.0, dtype=np.float32).reshape(20, 10)
OTHER = np.where(np.arange(200).reshape(20, 10) == 37, np.float32(40.5), WIDE)


@pytest.mark.parametrize(
    ("straight", "resumed", "text"),
    [
        (WIDE, OTHER, "x float32[20,10] differs; 1 of 2 leaves differ there;"),
        (jnp.bfloat16(1.5), jnp.bfloat16(2.5), "x bfloat16[] differs: 1.5 (uninterrupted) vs 2.5;"),
        (0.1, 0.1 + 2**-56, "x differs: 0.1 (uninterrupted) vs 0.10000000000000002;"),
        (3, 4, "x differs: 3 (uninterrupted) vs 4;"),
        (True, False, "x differs: 1.0 (uninterrupted) vs 0.0;"),
        (2**60, 2**60 + 1, "x differs: 1152921504606846976 (uninterrupted) vs 1152921504606846977;"),
        (10**400, 10**400 + 1, "x differs;"),
        (
            np.array([1, 2**63], np.uint64),
            np.array([1, 2**63 + 1], np.uint64),
            "x uint64[2] differs: [1, 9223372036854775808] (uninterrupted) vs [1, 9223372036854775809];",
        ),
        ("a", "b", "x differs;"),
        (np.zeros(2), np.zeros(3), "x differs: float64[2] (uninterrupted) vs float64[3] (resumed at 1);"),
        (np.zeros(2), np.zeros(2, np.int32), "x differs: float64[2] (uninterrupted) vs int32[2] (resumed at 1);"),
        (np.array([[1.0, np.nan]]), np.array([[1.0, 2.0]]), "x float64[1,2] differs: [[1.0, nan]] (uninterrupted) vs "),
        (np.array([True]), np.array([False]), "x bool[1] differs: [1.0] (uninterrupted) vs [0.0];"),
        (np.array([1j]), np.array([2j]), "x complex128[1] differs: [1j] (uninterrupted) vs [2j];"),
        (np.array([5, 0.0]), np.array([5, -0.0]), "x float64[2] differs: [5.0, 0.0] (uninterrupted) vs [5.0, -0.0];"),
    ],
)
def test_leaf_that_differs_is_reported(straight: Any, resumed: Any, text: str, tmp_path: Path) -> None:
    assert f"{described(straight, resumed, tmp_path)};".startswith(f"update 3: state/{text}")


def test_key_data_is_reported(tmp_path: Path) -> None:
    line = described(jax.random.key(0), jax.random.key(7), tmp_path)
    assert line.startswith("update 3: state/x key<threefry2x32>[2] differs: [0, 0] (uninterrupted) vs [0, 7]")


def test_leaf_that_only_one_run_has_is_reported(tmp_path: Path) -> None:
    line = described({"a": 1, "b": 2}, {"a": 1}, tmp_path)
    assert line.startswith("update 3: state/x/b is in the state of the uninterrupted run only; 1 of 3 leaves differ")


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (({"loss": 0.43123}, {"loss": 0.4377}), "loss differs: 0.43123 (uninterrupted) vs 0.4377 (resumed at 1)"),
        (
            ({"loss": 1.0}, {"loss": 1.0 + 2**-52}),
            "loss differs: 1.0 (uninterrupted) vs 1.0000000000000002 (resumed at 1)",
        ),
        (({"loss": 1.0}, {"loss": np.float32(1)}), "loss differs: python float (uninterrupted) vs float32[] (resumed"),
        (({"seen": 2**53}, {"seen": 2**53 + 1}), "seen differs: 9007199254740992 (uninterrupted) vs 9007199254740993 "),
        (({"a": 1, "loss": 2}, {"a": 1}), "loss is in the metrics of the uninterrupted run only"),
        (({"loss": float("nan")}, {"loss": 1.0}), "loss differs: nan (uninterrupted) vs 1.0 (resumed at 1)"),
    ],
)
def test_metric_that_differs_is_reported(metrics: tuple[Any, Any], text: str, tmp_path: Path) -> None:
    assert described(1, 1, tmp_path, metrics).startswith(f"update 3: {text}")


def test_report_lists_processes_and_their_records(tmp_path: Path) -> None:
    lines = first_lines(functools.partial(becomes, 1, 2, (None, None)), tmp_path / "proof")
    assert any(line.startswith("no batches were recorded") for line in lines)
    place = lines.index("what the processes did:")
    assert lines[place + 1 :] == [
        "  process 1: started from the beginning, raised an error in update 2",
        "  process 2: resumed at 1, ended after update 3",
        f"logs and records: {tmp_path / 'proof'}",
    ]
    assert sorted(os.listdir(tmp_path / "proof")) == ["interrupted", "uninterrupted", "uninterrupted-again"]
    assert all(len(line) <= 120 for line in lines[1:place] if line.startswith("  "))
