"""`jaxckpt stats`: numbers as numpy calculates them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection import diff as leaf_reads
from tests.support.commands import json_of, printed, refused
from tests.support.runs import flip_a_payload_byte, made_run, step_path

RANDOM = np.random.default_rng(5)
NUMBERS = {"count", "min", "max", "mean", "std", "norm", "nan", "inf", "zeros", "histogram"}
KEYS = {"part", "path", "of_magnitudes", *NUMBERS}


def stats_of(tmp_path: Path, tree: dict[str, Any], *options: str, code: int = 0) -> dict[str, dict[str, Any]]:
    jct.save(tmp_path / "c", tree, overwrite=True)
    found = json_of("stats", tmp_path / "c", *options, code=code)
    assert set(found) == {"path", "leaves", "skipped"}
    return {each["path"]: each for each in found["leaves"]}


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int32", "int8", "uint8", "float8_e4m3fn"]
)
@pytest.mark.parametrize("piece_bytes", [leaf_reads.PIECE_BYTES, 1 << 10], ids=["one piece", "pieces"])
def test_numbers_are_those_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(leaf_reads, "PIECE_BYTES", piece_bytes)
    values = (RANDOM.standard_normal((67, 45)) * 20 + 30).astype(getattr(ml_dtypes, dtype, dtype))
    found = stats_of(tmp_path, {"w": values})["w"]
    assert set(found) == KEYS
    exact = values.astype(np.float64)
    assert (found["count"], found["min"], found["max"]) == (exact.size, exact.min(), exact.max())
    np.testing.assert_allclose([found["mean"], found["std"]], [exact.mean(), exact.std()], rtol=1e-5)
    np.testing.assert_allclose(found["norm"], np.linalg.norm(exact), rtol=1e-6)
    assert (found["nan"], found["inf"], found["zeros"]) == (0, 0, int((exact == 0).sum()))
    counts, edges = np.histogram(exact, 20)
    assert found["histogram"]["counts"] == counts.tolist()
    np.testing.assert_allclose(found["histogram"]["edges"], edges)


def test_nonfinite_values_are_counted_with_code_1(tmp_path: Path) -> None:
    values = np.array([1, np.nan, -2, np.inf, -np.inf, 0, np.nan], np.float32)
    found = stats_of(tmp_path, {"bad": values, "good": np.ones(3)}, code=1)
    bad = found["bad"]
    assert (bad["nan"], bad["inf"], bad["zeros"], bad["count"]) == (2, 2, 1, 7)
    assert (bad["min"], bad["max"], bad["mean"]) == (-2, 1, pytest.approx(-1 / 3))
    assert sum(bad["histogram"]["counts"]) == 3
    assert (found["good"]["nan"], found["good"]["std"]) == (0, 0)
    assert "bad" in printed("stats", tmp_path / "c", code=1)


def test_empty_and_single_values_have_statistics(tmp_path: Path) -> None:
    tree = {
        "none": np.zeros((0, 4)),
        "one": np.float32(3),
        "all nan": np.full(2, np.nan),
        "flags": np.array([True, False]),
    }
    found = stats_of(tmp_path, tree, code=1)
    assert (found["none"]["count"], found["none"]["min"], found["none"]["mean"]) == (0, None, None)
    assert (found["one"]["min"], found["one"]["histogram"]["counts"]) == (3, [1])
    assert (found["all nan"]["min"], "histogram" in found["all nan"]) == (None, False)
    assert (found["flags"]["mean"], found["flags"]["zeros"]) == (0.5, 1)


def test_small_differences_of_large_values_are_kept(tmp_path: Path) -> None:
    near = 1e8 + np.array([0, 0.001, 0.002])
    assert stats_of(tmp_path, {"near": near})["near"]["std"] == pytest.approx(near.std(), rel=1e-6)


def test_extreme_doubles_give_infinite_squares(tmp_path: Path) -> None:
    found = stats_of(tmp_path, {"large": np.array([1e200, 2e200])})["large"]
    assert (found["max"], found["mean"], found["norm"]) == (2e200, 1.5e200, "inf")


def test_pattern_without_arrays_exits_with_2(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"state": {"lr": 0.5, "n": 3}, "data": jct.JsonValue(1)})
    message = refused("stats", tmp_path / "c", "lr", code=2)
    assert "lr selects no arrays" in message
    assert "`jaxckpt show`" in message
    assert printed("stats", tmp_path / "c") == "none of 2 leaves is an array\n"
    assert printed("stats", tmp_path / "c", "--part", "data") == "none of 0 leaves is an array\n"
    assert json_of("stats", tmp_path / "c")["leaves"] == []


def test_complex_values_count_by_their_magnitudes(tmp_path: Path) -> None:
    values = np.array([3 + 4j, 0, -5j])
    leaves = stats_of(tmp_path, {"w": np.ones(2), "z": values})
    found = leaves["z"]
    assert (found["min"], found["max"], found["norm"]) == (0, 5, pytest.approx(math.sqrt(50)))
    assert {name: leaf["of_magnitudes"] for name, leaf in leaves.items()} == {"w": False, "z": True}
    last = printed("stats", tmp_path / "c").splitlines()[-1]
    assert last.endswith("of their magnitudes")
    assert "magnitudes" not in printed("stats", tmp_path / "c", "w")


def test_only_selected_leaves_are_read(tmp_path: Path) -> None:
    found = stats_of(tmp_path, {"a": np.ones(2), "b": np.zeros(2), "n": 3}, "a", "n")
    assert set(found) == {"a"}
    assert "histogram" not in stats_of(tmp_path, {"a": np.ones(2)}, "--no-histogram")["a"]


def test_damaged_file_is_named_with_code_1(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    flip_a_payload_byte(step_path(run, 1))
    assert "p00000-s000.safetensors" in refused("stats", run, code=1)
