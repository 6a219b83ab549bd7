"""`jaxckpt diff`: where two checkpoints differ, bit by bit, and how far apart they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection import diff as leaf_reads
from tests.support.commands import json_of, printed, refused
from tests.support.runs import flip_a_payload_byte, made_run, segment_of, step_path

KEYS = {"part", "path", "kind", "a", "b", "value_a", "value_b", "differing", "count", "max_abs", "relative_norm"}


def differences(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], code: int = 1) -> dict[str, dict[str, Any]]:
    jct.save(tmp_path / "a", a, overwrite=True)
    jct.save(tmp_path / "b", b, overwrite=True)
    found = json_of("diff", tmp_path / "a", tmp_path / "b", code=code)
    assert set(found) == {"a", "b", "equal", "differences", "skipped_a", "skipped_b"}
    assert all(set(each) == KEYS for each in found["differences"])
    return {each["path"]: each for each in found["differences"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float64"])
@pytest.mark.parametrize("piece_bytes", [leaf_reads.PIECE_BYTES, 1 << 10], ids=["one piece", "pieces"])
def test_numbers_are_those_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(leaf_reads, "PIECE_BYTES", piece_bytes)
    random = np.random.default_rng(6)
    a = (random.standard_normal((50, 40)) * 30).astype(getattr(ml_dtypes, dtype, dtype))
    b = a.copy()
    b[random.random(a.shape) < 0.2] += np.array(2, a.dtype)
    found = differences(tmp_path, {"w": a, "same": a}, {"w": b, "same": a})
    assert set(found) == {"w"}
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    assert (found["w"]["kind"], found["w"]["count"]) == ("value", a.size)
    assert found["w"]["differing"] == int((exact_a != exact_b).sum())
    assert found["w"]["max_abs"] == np.abs(exact_a - exact_b).max()
    relative = np.linalg.norm(exact_a - exact_b) / np.linalg.norm(exact_a)
    np.testing.assert_allclose(found["w"]["relative_norm"], relative, rtol=1e-6)


def test_equal_checkpoints_end_with_0(tmp_path: Path) -> None:
    tree = {"w": np.array([np.nan, -0.0, 1]), "n": 3, "key": jax.random.key(1)}
    assert differences(tmp_path, tree, tree, code=0) == {}
    assert printed("diff", tmp_path / "a", tmp_path / "b") == "3 leaves are equal, 0 differ\n"


def test_signed_zeros_differ_and_nans_are_equal(tmp_path: Path) -> None:
    found = differences(tmp_path, {"w": np.array([0.0, np.nan])}, {"w": np.array([-0.0, np.nan])})
    assert (found["w"]["differing"], found["w"]["max_abs"]) == (1, 0)


def test_value_that_became_nan_is_reported(tmp_path: Path) -> None:
    found = differences(tmp_path, {"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, np.nan])})
    assert (found["w"]["differing"], found["w"]["max_abs"]) == (1, "nan")


def test_missing_leaves_and_other_types_are_shown(tmp_path: Path) -> None:
    a = {"w": np.zeros((2, 3), np.float32), "old": np.zeros(1), "n": 3}
    b = {"w": np.zeros((3, 2), np.float32), "new": "text", "n": 3.5}
    found = differences(tmp_path, a, b)
    assert {path: each["kind"] for path, each in found.items()} == {
        "w": "form", "old": "only_a", "new": "only_b", "n": "form",
    }  # fmt: skip
    assert (found["w"]["a"], found["w"]["b"]) == ("float32[2,3]", "float32[3,2]")
    assert (found["old"]["b"], found["new"]["a"], found["new"]["value_b"]) == (None, None, "text")
    lines = {
        line.split()[0]: " ".join(line.split())
        for line in printed("diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    }
    assert lines["state/w"] == "state/w float32[2,3] -> float32[3,2]"
    assert lines["state/n"] == "state/n Python int 3 -> Python float 3.5"
    assert lines["state/old"] == "state/old only in the first: float64[1]"
    assert lines["state/new"] == "state/new only in the second: Python str 'text'"
    assert lines["0"] == "0 leaves are equal, 4 differ"


def test_both_values_of_plain_leaves_are_shown(tmp_path: Path) -> None:
    a = {"n": 3, "name": "before", "flag": True, "z": 1j, "large": 1 << 60, "same": 1}
    b = {"n": 5, "name": "after", "flag": False, "z": 2j, "large": 1 << 61, "same": 1}
    found = differences(tmp_path, a, b)
    assert {path: (each["value_a"], each["value_b"]) for path, each in found.items()} == {
        "n": (3, 5),
        "name": ("before", "after"),
        "flag": (True, False),
        "z": ("1j", "2j"),
        "large": (str(1 << 60), str(1 << 61)),
    }
    assert {(each["kind"], each["count"], each["max_abs"]) for each in found.values()} == {("value", 0, None)}
    text = printed("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "Python int 3 -> Python int 5" in text
    assert "Python str 'before' -> Python str 'after'" in text


def test_the_same_values_in_other_chunks_are_equal(tmp_path: Path) -> None:
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))
    assert differences(tmp_path, {"w": values}, {"w": jax.device_put(values, sharding)}, code=0) == {}


def test_leaves_with_equal_digests_are_not_read(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    jct.save(tmp_path / "b", jct.load(step_path(run, 1)))
    segment_of(step_path(run, 1)).unlink()
    assert json_of("diff", run, tmp_path / "b")["equal"] == 2


def test_damaged_file_is_named_with_code_1(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    flip_a_payload_byte(step_path(run, 1))
    message = refused("diff", run, run, "--step-a", 1, code=1)
    assert str(segment_of(step_path(run, 1))) in message


def test_steps_of_runs_and_leaves_are_chosen(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    found = json_of("diff", run, run, "--step-a", 1, "--step-b", 2, "--only", "step", code=1)
    assert (found["a"], found["b"]) == (str(step_path(run, 1)), str(step_path(run, 2)))
    assert [(each["path"], each["max_abs"]) for each in found["differences"]] == [("step", 1)]
    assert json_of("diff", run, run, "--only", "state/w")["equal"] == 1


def test_relative_norm_is_nan_if_not_finite(tmp_path: Path) -> None:
    one = np.array([1.0, 2.0, 3.0])
    for bad in (np.inf, np.nan):
        found = differences(tmp_path, {"w": one, "v": one}, {"w": one * [1, 1, bad], "v": one * [1, 2, bad]})
        assert (found["w"]["max_abs"], found["w"]["relative_norm"]) == (str(bad), "nan")
        assert found["v"]["relative_norm"] == pytest.approx(2 / np.linalg.norm(one))
        (line,) = (
            each for each in printed("diff", tmp_path / "a", tmp_path / "b", code=1).splitlines() if "/w" in each
        )
        assert line.split()[-2:] == [str(bad), "nan"]
    found = differences(tmp_path, {"w": np.zeros(2)}, {"w": np.array([0.0, -0.0])})
    assert found["w"]["relative_norm"] == 0
