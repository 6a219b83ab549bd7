"""Metadata: the contents of a checkpoint, read on any machine without touching a device or the data."""

from __future__ import annotations

import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.checkpoints import rewrite
from tests.support.described_states import state
from tests.support.same_trees import raw


def test_every_leaf_is_described(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", state())
    part = jct.metadata(tmp_path / "c").checkpointables["state"]
    leaves = part.leaves
    assert {name: leaf.description for name, leaf in leaves.items()} == {
        "w": "float32[16,16]",
        "rows": "bfloat16[8,8]",
        "keys": "key<rbg>[3]",
        "host": "int64[3]",
        "point/x": "Python float",
        "point/y/0": "None",
        "point/y/1": "an empty container",
        "point/y/2": "Python str",
    }
    assert (leaves["w"].shape, leaves["w"].dtype, leaves["w"].bytes) == ((16, 16), np.float32, 1024)
    assert leaves["w"].sharding == {"mesh": {"data": 4, "model": 2}, "spec": ["data", "model"]}
    assert leaves["rows"].sharding == {"mesh": {"data": 4, "model": 2}, "spec": [["data", "model"]]}
    assert leaves["host"].sharding is None
    assert (leaves["keys"].shape, leaves["keys"].bytes) == ((3,), 48)
    assert (leaves["point/x"].value, leaves["point/y/2"].value, leaves["point/x"].shape) == (1.5, "text", None)
    assert part.bytes == 1024 + 128 + 48 + 24


def test_the_tree_is_a_target_for_a_load(tmp_path: Path) -> None:
    saved = {name: leaf for name, leaf in state().items() if name != "host"}
    jct.save(tmp_path / "c", saved)
    tree = jct.metadata(tmp_path / "c").checkpointables["state"].tree
    assert tree["point"] == {"x": 1.5, "y": [None, {}, "text"]}
    assert tree["w"] == jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = jct.load(tmp_path / "c", tree)
    assert {name: raw(found[name]) for name in ("w", "rows", "keys")} == {
        name: raw(saved[name]) for name in ("w", "rows", "keys")
    }
    assert found["point"] == tree["point"]


def test_checkpoint_describes_itself(tmp_path: Path) -> None:
    before = datetime.datetime.now(datetime.UTC)
    notes = {"git": "abc", "losses": [0.5, 1], "nested": {"a": None}}
    returned = jct.save(tmp_path / "c", state(), custom_metadata=notes)
    found = jct.metadata(tmp_path / "c")
    assert found == returned
    assert (found.path, found.format_version, found.digest) == (str(tmp_path / "c"), 1, "xxh3-128")
    assert (found.step, found.metrics, found.custom_metadata) == (None, {}, notes)
    assert found.versions["jax"] == jax.__version__
    assert abs(datetime.datetime.fromisoformat(found.created) - before) < datetime.timedelta(minutes=5)
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert "_committed" not in repr(found)


def test_custom_metadata_must_be_json(tmp_path: Path) -> None:
    for notes in ({"when": object()}, {"pair": (1, 2)}, {1: 2}, float("nan")):
        with pytest.raises(jct.UnsupportedLeafError, match=r"custom_metadata: .*JSON"):
            jct.save_async(tmp_path / "c", {"a": 1}, custom_metadata=notes)
    assert list(tmp_path.iterdir()) == []


def test_too_large_metadata_is_refused_before_writing(tmp_path: Path) -> None:
    expected = r"custom_metadata: .*at most 1,048,576 bytes .*, found [\d,]+"
    with pytest.raises(jct.SettingsError, match=expected):
        jct.save_async(tmp_path / "c", {"a": 1}, custom_metadata={"text": "x" * (1 << 20)})
    assert list(tmp_path.iterdir()) == []
    with jct.StepManager(tmp_path / "run") as manager:
        with pytest.raises(jct.SettingsError, match=expected):
            manager.save(1, {"state": {"a": 1}}, custom_metadata=[[]] * 400_000, force=True)
        with pytest.raises(jct.SettingsError, match=r"metrics: .*at most 1,048,576 bytes"):
            manager.save(1, {"state": {"a": 1}}, metrics={str(n): 0.5 for n in range(200_000)}, force=True)
        assert manager.steps == []


def test_largest_custom_metadata_is_loaded_whole(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        for size in range(1 << 20, 0, -1):  # how much room the other metadata takes is not part of the promise
            try:
                manager.save(1, {"state": {"a": 1}}, custom_metadata="x" * size, force=True)
            except jct.SettingsError:
                continue
            break
        manager.wait()
        assert manager.steps == [1]
        assert jct.metadata(manager.path(1)).custom_metadata == "x" * size
    assert (1 << 20) - 1000 < size < (1 << 20) - 100


def test_later_changes_do_not_reach_custom_metadata(tmp_path: Path) -> None:
    notes = {"losses": [1.0]}
    pending = jct.save_async(tmp_path / "c", {"a": 1}, custom_metadata=notes)
    notes["losses"].append(2.0)
    assert pending.wait().custom_metadata == {"losses": [1.0]}
    assert jct.metadata(tmp_path / "c").custom_metadata == {"losses": [1.0]}


def test_no_data_is_read(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", state())
    for segment in tmp_path.rglob("*.safetensors"):
        segment.unlink()
    assert jct.metadata(tmp_path / "c").checkpointables["state"].leaves["w"].bytes == 1024


def test_key_of_unknown_implementation_is_described(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"key": jax.random.split(jax.random.key(0), 3), "w": jnp.arange(2.0)})
    rewrite(tmp_path / "c", lambda manifest: manifest["parts"][0]["detail"]["leaves"]["key"].update(impl="mine"))
    part = jct.metadata(tmp_path / "c").checkpointables["state"]
    assert (part.leaves["key"].description, part.leaves["key"].shape) == ("key<mine>[3]", (3,))
    assert part.tree["key"] == jax.ShapeDtypeStruct((3, 2), jnp.uint32)
    assert jct.load(tmp_path / "c", part.tree, only="w")["w"].tolist() == [0.0, 1.0]
    with pytest.raises(jct.MismatchError, match=r"leaf 'key': saved key<mine>\[3\]"):
        jct.load(tmp_path / "c", part.tree)


@pytest.mark.parametrize("metrics", [[1], "text", 5, {"a": None, "b": [1], "c": 10**400, "d": "x"}])
def test_invalid_metrics_are_left_out(tmp_path: Path, metrics: object) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(2.0)})
    rewrite(tmp_path / "c", lambda manifest: manifest["info"].update(metrics=metrics))
    assert jct.metadata(tmp_path / "c").metrics == {}
