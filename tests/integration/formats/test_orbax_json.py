"""JSON that Orbax itself wrote: NaN and infinities are loaded, and damage raises an error."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp1

import jaxckpt_train as jct
from tests.support.commands import json_of, refused, run
from tests.support.same_trees import raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
CONFIG = {"best": math.inf, "worst": -math.inf, "last": [math.nan, 1, 10**30, None], "ü": "ü"}
METRICS = {"loss": math.nan, "gain": -math.inf, "accuracy": 0.5}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step with NaN and infinities in its metrics, in an item, and in the metadata of a tree."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        state = ocp.args.PyTreeSave({"w": np.arange(4)}, custom_metadata={"scale": math.nan, "limit": [math.inf]})
        items = {"state": state, "config": ocp.args.JsonSave(CONFIG)}
        manager.save(7, args=ocp.args.Composite(**items), metrics=METRICS)
    return tmp_path / "run" / "7"


def assert_all_there(path: Path) -> None:
    found = jct.load_checkpointables(path)
    assert raw(found["state"]["w"]) == raw(np.arange(4))
    assert repr(found["config"].value) == repr(CONFIG)
    metadata = jct.metadata(path)
    assert repr(dict(metadata.metrics)) == repr(METRICS)
    assert metadata.custom_metadata == {"scale": "nan", "limit": ["inf"]}


def test_nan_and_inf_are_loaded_and_imported(step: Path, tmp_path: Path) -> None:
    assert raw(jct.load(step)["w"]) == raw(np.arange(4))
    assert_all_there(step)
    assert run("import", step, tmp_path / "all").exit_code == 0
    assert_all_there(tmp_path / "all")
    assert jct.verify(tmp_path / "all").ok
    assert run("diff", step, tmp_path / "all").exit_code == 0
    assert json.loads((tmp_path / "all" / "manifest.json").read_text())["info"]["metrics"]["loss"] == "nan"
    for path in (step, tmp_path / "all"):
        assert json_of("show", path)["metrics"] == {"loss": "nan", "gain": "-inf", "accuracy": 0.5}


def test_run_saves_and_restores_nan_metrics(step: Path, tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "ours") as manager:
        manager.save(8, jct.load_checkpointables(step), metrics=jct.metadata(step).metrics)
    with jct.StepManager(tmp_path / "ours") as manager:
        found = manager.restore({"state": None, "config": None})
    assert repr(found["config"].value) == repr(CONFIG)
    assert repr(dict(jct.metadata(tmp_path / "ours" / "step-0000000008").metrics)) == repr(METRICS)


def test_nan_and_inf_of_v1_are_loaded(tmp_path: Path) -> None:
    ocp1.save(tmp_path / "a", {"w": np.arange(4)}, custom_metadata={"x": math.nan})
    with ocp1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_pytree(7, {"w": np.arange(4)}, metrics={"loss": math.inf})
    assert raw(jct.load(tmp_path / "a")["w"]) == raw(np.arange(4))
    assert jct.metadata(tmp_path / "a").custom_metadata == {"x": "nan"}
    assert jct.metadata(tmp_path / "run" / "7").metrics == {"loss": math.inf}
    assert run("import", tmp_path / "run" / "7", tmp_path / "out").exit_code == 0
    assert jct.metadata(tmp_path / "out").metrics == {"loss": math.inf}


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a":', b"[" * 100_000, b'{"a": "\xff"}', b'{"a": Infinite}', b'{"a": "\\ud800", "b": NaN}', b"1" * 5000],
    ids=["nothing", "cut off", "deep", "no text", "a word", "half a letter", "long"],
)
def test_damaged_item_is_reported_when_read(content: bytes, step: Path, tmp_path: Path) -> None:
    for name, file in (("config", "config/metadata"), ("metrics", "metrics/metrics")):
        whole = (step / file).read_bytes()
        (step / file).write_bytes(content)
        with pytest.raises(jct.CorruptCheckpointError, match=f"7/{file}: expected JSON"):
            jct.load_checkpointables(step)
        assert raw(jct.load(step)["w"]) == raw(np.arange(4))
        assert run("import", step, tmp_path / name, "--part", "state").exit_code == 0
        assert f"7/{file}: expected JSON" in refused("import", step, tmp_path / "all", code=1)
        (step / file).write_bytes(whole)
    (step / "_CHECKPOINT_METADATA").write_bytes(content)
    with pytest.raises(jct.CorruptCheckpointError, match="7/_CHECKPOINT_METADATA: expected JSON"):
        jct.load(step)


@pytest.mark.parametrize("found", [10**30, -1, 3 * 10**20, True, 1.5, "now"])
def test_invalid_commit_time_is_left_out(found: object, step: Path) -> None:
    file = step / "_CHECKPOINT_METADATA"
    saved = json.loads(file.read_text())
    assert json_of("show", step)["created"] != ""
    file.write_text(json.dumps({**saved, "commit_timestamp_nsecs": found}))
    assert raw(jct.load(step)["w"]) == raw(np.arange(4))
    assert "1970" in json_of("show", step).get("created", "1970")


@pytest.mark.parametrize("handler", ["my.package.JsonHandler", "my.package.PyTreeHandler"])
def test_items_of_custom_handlers_are_ignored(handler: str, step: Path) -> None:
    file = step / "_CHECKPOINT_METADATA"
    saved = json.loads(file.read_text())
    saved["item_handlers"]["mine"] = handler
    file.write_text(json.dumps(saved))
    (step / "mine").mkdir()
    (step / "mine" / "a.bin").write_bytes(b"\xff\x00")
    assert set(jct.load_checkpointables(step)) == {"state", "config"}
    assert raw(jct.load(step)["w"]) == raw(np.arange(4))
