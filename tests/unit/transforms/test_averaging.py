"""The operation that averages leaves over checkpoints, and `jaxckpt average`: values equal those of numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused, run
from tests.support.runs import flip_a_payload_byte, step_path, truncate_the_manifest

DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "complex64"]


def arrays(step: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(step).normal(size=(7, 5))
    return {name: values.astype(getattr(ml_dtypes, name, name)) for name in DTYPES}


def state(step: int) -> dict[str, Any]:
    params = {**arrays(step), "count": np.int32(3), "key": jax.random.key(1), "scale": 0.5 * step, "name": "a"}
    return {"params": params, "opt": {"mu": np.full(4, step, np.float32), "count": np.int32(step)}, "step": step}


def mean(name: str, *steps: int) -> np.ndarray:
    wide = np.complex128 if "complex" in name else np.float64
    return np.mean([arrays(step)[name].astype(wide) for step in steps], 0).astype(arrays(0)[name].dtype)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with jct.StepManager(tmp_path / "run") as manager:
        for step in range(1, 5):
            manager.save(step, {"state": state(step), "data": jct.JsonValue({"at": step})}, metrics={"loss": 1.0})
    return tmp_path / "run"


def test_last_steps_are_averaged_into_a_new_checkpoint(directory: Path, tmp_path: Path) -> None:
    text = printed("average", directory, tmp_path / "mean", "--last", 3)
    assert text.splitlines()[-1].endswith("the mean of steps 2, 3, 4")
    found = jct.load(tmp_path / "mean")
    for name in DTYPES:
        assert found["params"][name].dtype == arrays(0)[name].dtype
        assert found["params"][name].tobytes() == mean(name, 2, 3, 4).tobytes(), name
    assert (found["params"]["scale"], found["params"]["name"], found["params"]["count"]) == (1.5, "a", 3)
    assert jax.random.key_data(found["params"]["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    assert (found["step"], found["opt"]["mu"].tolist(), found["opt"]["count"]) == (4, [4] * 4, 4)
    assert jct.load_checkpointables(tmp_path / "mean")["data"] == jct.JsonValue({"at": 4})
    assert run("verify", tmp_path / "mean").exit_code == 0
    shown = json_of("show", tmp_path / "mean")
    assert shown["step"] == 4
    assert "metrics" not in shown


@pytest.mark.parametrize(
    ("more", "steps"), [([], (1, 2, 3, 4)), (["--step", 3, "--step", 1], (1, 3)), (["-l", 2], (3, 4))]
)
def test_steps_and_leaves_are_chosen(directory: Path, tmp_path: Path, more: list[Any], steps: tuple[int, ...]) -> None:
    chosen = ["--leaves", "**/float32", "--only", "params/float*"]
    found = json_of("average", directory, tmp_path / "mean", *more, *chosen, "--part", "state")
    assert found["steps"] == list(steps)
    loaded = jct.load(tmp_path / "mean")["params"]
    assert loaded["float32"].tobytes() == mean("float32", *steps).tobytes()
    assert loaded["float64"].tobytes() == arrays(steps[-1])["float64"].tobytes()
    assert "bfloat16" not in loaded


def test_dry_run_writes_nothing(directory: Path, tmp_path: Path) -> None:
    found = json_of("average", directory, tmp_path / "mean", "--dry-run")
    assert len(found["plan"][0]["changes"]) == len(DTYPES) + 1
    assert found["leaves"] > 0
    assert not (tmp_path / "mean").exists()


def test_damaged_steps_are_skipped_or_refused(directory: Path, tmp_path: Path) -> None:
    truncate_the_manifest(step_path(directory, 3))
    found = json_of("average", directory, tmp_path / "mean", "--last", 2)
    assert found["steps"] == [2, 4]
    assert found["skipped"] == [step_path(directory, 3).name]
    assert "has no valid step 3" in refused("average", directory, tmp_path / "x", "--step", 3, "--step", 4, code=3)
    assert "expected 4 valid steps" in refused("average", directory, tmp_path / "x", "--last", 4, code=3)
    flip_a_payload_byte(step_path(directory, 2))
    assert run("average", directory, tmp_path / "x", "--last", 2, "--leaves", "**/float*").exit_code == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--leaves", "opt/**"], 2, "leaf 'opt/count' of int32 cannot be averaged"),
        (["--leaves", "**"], 2, "leaf 'step' is int"),
        (["--leaves", "opt/count"], 2, "selects no floating-point leaves"),
        (["--leaves", "parms/**"], 2, 'did you mean "params/**"?'),
        (["--last", 2, "--step", 3], 2, "found both"),
        (["--step", 3], 2, "expected at least two steps"),
        (["--step", "x"], 2, "expected a number"),
        (["--part", "data"], 2, "'data'"),
    ],
)
def test_leaves_without_mean_are_refused(
    directory: Path, tmp_path: Path, more: list[Any], code: int, message: str
) -> None:
    done = run("average", directory, tmp_path / "mean", *more)
    assert done.exit_code == code
    assert message in " ".join(done.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_operation_loads_onto_shards_and_inits_a_run(directory: Path, tmp_path: Path) -> None:
    other = [str(step_path(directory, step)) for step in (1, 2)]
    operation = {"op": "average", "leaves": "params/float32", "with": other}
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(None, "x"))
    like = {"params": {"float32": jax.ShapeDtypeStruct((7, 5), jnp.float32, sharding=sharding)}}
    only = "params/float32"
    found = jct.load(step_path(directory, 4), like, only=only, transforms=[operation])
    assert np.asarray(found["params"]["float32"]).tobytes() == mean("float32", 4, 1, 2).tobytes()
    start = {"path": str(step_path(directory, 4)), "transforms": [operation], "only": only}
    with jct.CheckpointCallback(tmp_path / "new", init_from=start) as ckpt:
        begun = ckpt.resume({"params": {"float32": jnp.zeros((7, 5))}})
    assert np.asarray(begun["params"]["float32"]).tobytes() == mean("float32", 4, 1, 2).tobytes()
    words = f"average params/float32 {','.join(other)}"
    assert run("import", step_path(directory, 4), tmp_path / "b", "--op", words).exit_code == 0
    assert jct.load(tmp_path / "b")["params"]["float32"].tobytes() == mean("float32", 4, 1, 2).tobytes()


def test_trees_that_differ_are_refused(tmp_path: Path) -> None:
    trees: dict[str, dict[str, Any]] = {
        "a": {"w": np.ones(3, np.float32), "n": 1.0},
        "shape": {"w": np.ones(4, np.float32), "n": 1.0},
        "dtype": {"w": np.ones(3, np.float16), "n": 1.0},
        "missing": {"w": np.ones(3, np.float32)},
        "more": {"w": np.ones(3, np.float32), "n": 1.0, "x": 2.0},
        "kind": {"w": np.ones(3, np.float32), "n": 1},
    }
    for name, tree in trees.items():
        jct.save(tmp_path / name, tree)
    leaf = {"shape": "'w'", "dtype": "'w'", "missing": "'n'", "more": "'x'", "kind": "'n'"}
    for name, expected in leaf.items():
        with pytest.raises(jct.MismatchError, match=f"leaf {expected}"):
            jct.load(tmp_path / "a", transforms=[{"op": "average", "leaves": "**", "with": [str(tmp_path / name)]}])
    with pytest.raises(jct.NotACheckpointError):
        jct.load(tmp_path / "a", transforms=[{"op": "average", "leaves": "**", "with": [str(tmp_path / "gone")]}])
    for wrong in ("a", [], [3]):
        with pytest.raises(jct.SettingsError, match="with"):
            jct.load(tmp_path / "a", transforms=[{"op": "average", "leaves": "**", "with": wrong}])


def test_large_arrays_with_special_values_are_averaged(tmp_path: Path) -> None:
    values = [np.random.default_rng(n).normal(size=(3_000_001,)).astype(np.float32) for n in range(3)]
    values[0][5], values[1][6], values[2][7] = np.nan, np.inf, 3e38
    values[0][7] = values[1][7] = 3e38  # their sum does not fit into float32
    for number, array in enumerate(values):
        jct.save(tmp_path / f"{number}", {"w": array})
    others = [str(tmp_path / name) for name in ("1", "2")]
    found = jct.load(tmp_path / "0", transforms=[{"op": "average", "leaves": "w", "with": others}])["w"]
    expected = np.mean([array.astype(np.float64) for array in values], 0).astype(np.float32)
    assert found.tobytes() == expected.tobytes()
    assert found[7] == np.float32(3e38)
