"""`--step` of runs of Orbax and directories of Flax: what it selects, its default, and its errors."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused
from tests.support.flax_saves import save, state_of
from tests.support.runs import made_run
from tests.support.same_trees import raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def assert_is(path: Path, step: float) -> None:
    assert raw(jct.load(path)["params"]["w"]) == raw(state_of(step)["params"]["w"])


def orbax_run(directory: Path, *steps: int) -> Path:
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(state_of(step)))
    return directory


def test_flax_step_is_newest_or_given_one(tmp_path: Path) -> None:
    save(tmp_path / "flax", 9, 10, 0.5 + 10)
    found = json_of("show", tmp_path / "flax")
    assert (found["path"], found["kind"], found.get("step")) == (f"{tmp_path}/flax/checkpoint_10.5", "Flax", None)
    found = json_of("show", tmp_path / "flax", "--step", 9)
    assert (found["path"], found["step"]) == (f"{tmp_path}/flax/checkpoint_9", 9)
    (leaf,) = json_of("stats", tmp_path / "flax", "params/w", "--step", 9)["leaves"]
    assert (leaf["min"], leaf["max"], leaf["count"]) == (9.0, 14.0, 6)
    printed("import", tmp_path / "flax", tmp_path / "newest")
    printed("import", tmp_path / "flax", tmp_path / "chosen", "--step", 10)
    assert_is(tmp_path / "newest", 10.5)
    assert_is(tmp_path / "chosen", 10)
    assert jct.verify(tmp_path / "chosen").ok
    assert jct.metadata(tmp_path / "chosen").step == 10
    assert json_of("diff", tmp_path / "flax", tmp_path / "chosen", "--step-a", 10)["differences"] == []
    (first, *_) = json_of("diff", tmp_path / "flax", tmp_path / "flax", "--step-a", 9, code=1)["differences"]
    assert first["max_abs"] == 1.5
    printed("export", tmp_path / "flax", tmp_path / "hf", "--to", "safetensors", "--step", 9)
    assert raw(jct.load(tmp_path / "hf")["params.w"]) == raw(state_of(9)["params"]["w"])


def test_history_does_not_hide_flax_steps(tmp_path: Path) -> None:
    """A loop that was refused in this directory leaves its history."""
    save(tmp_path / "flax", 9, 10)
    (tmp_path / "flax" / "history.jsonl").touch()
    assert json_of("show", tmp_path / "flax")["path"] == f"{tmp_path}/flax/checkpoint_10"
    assert json_of("show", tmp_path / "flax", "--step", 9)["path"] == f"{tmp_path}/flax/checkpoint_9"


def test_flax_step_may_have_a_fraction(tmp_path: Path) -> None:
    save(tmp_path / "flax", 8, 9.5, 10)
    for command in ("show", "stats"):
        assert json_of(command, tmp_path / "flax", "--step", "9.5")["path"] == f"{tmp_path}/flax/checkpoint_9.5"
    for text in ("9.5", "9.50", "95e-1"):
        printed("import", tmp_path / "flax", tmp_path / text, "--step", text)
        assert_is(tmp_path / text, 9.5)
    printed("export", tmp_path / "flax", tmp_path / "hf", "--to", "safetensors", "-s", "9.5")
    assert raw(jct.load(tmp_path / "hf")["params.w"]) == raw(state_of(9.5)["params"]["w"])
    (first, *_) = json_of("diff", tmp_path / "flax", tmp_path / "flax", "--step-a=8", "--step-b=9.5", code=1)[
        "differences"
    ]
    assert first["max_abs"] == 1.5
    assert json_of("show", tmp_path / "flax", "--step", "8.0")["step"] == 8
    message = refused("show", tmp_path / "flax", "--step", "9.25", code=3)
    assert re.search(r"/flax: .*step 9\.25; .* 8, 9\.5, 10$", message)


def test_step_of_other_runs_is_whole(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    for command in (["show", run], ["verify", run], ["cp", run, tmp_path / "copy"], ["mv", run, tmp_path / "moved"]):
        assert "has no step 1.5; the last steps are 1, 2" in refused(*command, "--step", "1.5", code=3)
    orbax = orbax_run(tmp_path / "orbax", 9, 10)
    assert re.search(r"/orbax: .*step 9\.5; .* 9, 10", refused("show", orbax, "--step", "9.5", code=3))
    assert json_of("show", orbax, "--step", "9.0")["path"] == f"{orbax}/9"
    assert "has no step 9007199254740993;" in refused("show", run, "--step", 2**53 + 1, code=3)
    for text in ("x", "nan", "inf", "1e999", ""):
        for command in (["diff", run, run, f"--step-a={text}"], ["diff", run, run, f"--step-b={text}"]):
            message = json_of(*command, code=2)["message"]
            assert command[-1][:8] in message
            assert message.endswith(f", found {text!r}")
        assert json_of("show", run, f"--step={text}", code=2)["error"] == "UsageError"


def test_orbax_step_must_be_given(tmp_path: Path) -> None:
    run = orbax_run(tmp_path / "orbax", 9, 10)
    assert re.search("Orbax run with 2 steps, .* 9, 10;", refused("show", run, code=3))
    found = json_of("show", run, "--step", 9)
    assert (found["path"], found["kind"], found["step"]) == (f"{run}/9", "Orbax", 9)
    printed("import", run, tmp_path / "ours", "--step", 10)
    assert_is(tmp_path / "ours", 10)
    assert json_of("diff", run, tmp_path / "ours", "--step-a", 10)["differences"] == []
    assert json_of("stats", run, "params/w", "-s", 9)["leaves"][0]["max"] == 14.0
    assert re.search("/orbax: .*step 11; .* 9, 10", refused("show", run, "--step", 11, code=3))


def test_missing_and_damaged_steps_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "flax", 9, 10, 11)
    jct.save(tmp_path / "single", {"w": np.ones(3)})
    for command in ("show", "stats"):
        message = refused(command, tmp_path / "flax", "--step", 12, code=3)
        assert re.search("/flax: .*step 12; .* 9, 10, 11$", message)
    for path in (tmp_path / "flax" / "checkpoint_9", tmp_path / "single"):
        assert f"{path}: expected a run with a step 9" in refused("show", path, "--step", 9, code=3)
    newest = tmp_path / "flax" / "checkpoint_11"
    newest.write_bytes(newest.read_bytes()[:-7])
    assert f"{newest}: expected a Flax msgpack file" in refused("show", tmp_path / "flax", code=1)
    assert f"pass {tmp_path}/flax/checkpoint_10" in refused("import", tmp_path / "flax", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()
    assert json_of("show", tmp_path / "flax", "--step", 10)["step"] == 10
    message = refused("verify", tmp_path / "flax", "--step", 10, code=3)
    assert "checkpoint_10: expected a checkpoint with digests" in message


def test_parts_of_orbax_items_are_no_steps(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", state_of(3))
    items = ocp.args.Composite(model_1=ocp.args.StandardSave(state_of(4)))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(20, args=items)
    assert (tmp_path / "item" / "ocdbt.process_0").is_dir()
    for path in (tmp_path / "item", tmp_path / "run" / "20"):
        for step in (0, 1, 3):
            for command in (["show", path], ["import", path, tmp_path / "out"]):
                message = refused(*command, "--step", step, code=3)
                assert f"{path}: expected a run with a step {step}" in message
    (tmp_path / "item" / "manifest.ocdbt").unlink()
    (tmp_path / "item" / "_METADATA").unlink()
    assert "Orbax run" not in refused("show", tmp_path / "item", code=3)


def test_ls_names_checkpoints_of_other_tools(tmp_path: Path) -> None:
    found = {
        orbax_run(tmp_path / "orbax", 3, 12): "steps of Orbax, the last ones 3, 12",
        tmp_path / "flax": "checkpoints of Flax, the last ones checkpoint_9, checkpoint_10",
        tmp_path / "ours": "one checkpoint of this package",
        tmp_path / "folder" / "model.safetensors": "a file",
    }
    save(tmp_path / "flax", 9, 10)
    jct.save(tmp_path / "ours", {"w": np.ones(3)})
    (tmp_path / "folder").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "folder" / "model.safetensors")
    for path, text in found.items():
        message = refused("ls", path, code=3)
        assert f"found {text}: use `jaxckpt show {path}`" in message
    (tmp_path / "empty").mkdir()
    assert "found no steps" in refused("ls", tmp_path / "empty", code=3)
