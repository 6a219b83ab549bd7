"""Exports that the real Orbax restores, by both interfaces, equal byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp1

import jaxckpt_train as jct
from jaxckpt_train.formats import orbax_write
from jaxckpt_train.formats.orbax_write import export_orbax
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.integration.formats.test_orbax_loads import blank
from tests.support.model_states import STATES
from tests.support.same_trees import assert_same, raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
BACKEND = LocalBackend()


def export(source: Path, final: Path, item: str | None = None) -> str:
    committed = open_committed(BACKEND, str(source))
    part = committed.manifest.parts[0]
    return export_orbax(BACKEND, committed, part, BACKEND, str(final), StoreSettings(), item=item)


def by_tree_handler(step: Path, target: Any) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(step / "state", args=ocp.args.PyTreeRestore(target, restore_args=arguments))


def by_manager(step: Path, target: Any) -> Any:
    with ocp.CheckpointManager(step.parent) as manager:
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        restored = manager.restore(
            int(step.name), args=ocp.args.Composite(state=ocp.args.PyTreeRestore(target, restore_args=arguments))
        )
        return restored["state"]


def by_second_interface(step: Path, target: Any) -> Any:
    return ocp1.load_pytree(step, target)


RESTORES: dict[str, Callable[[Path, Any], Any]] = {
    "handler": by_tree_handler,
    "manager": by_manager,
    "v1": by_second_interface,
}


@pytest.mark.parametrize("how", list(RESTORES))
@pytest.mark.parametrize("name", list(STATES))
def test_orbax_restores_what_was_exported(name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = STATES[name]()
    monkeypatch.setattr(orbax_write, "CHUNK_BYTES", 1000)  # several to an array
    jct.save(tmp_path / "a", state)
    assert export(tmp_path / "a", tmp_path / "run" / "12") == "state"
    restored = RESTORES[how](tmp_path / "run" / "12", jax.tree.map(blank, state))
    assert_same_content(restored, state)
    assert_same(jct.load(tmp_path / "run" / "12", jax.tree.map(blank, state)), state)


@pytest.mark.parametrize("how", list(RESTORES))
@pytest.mark.parametrize(
    "state",
    [np.arange(3.0), jax.numpy.ones(2), jax.random.key(7), 3, "text"],
    ids=["numpy", "jax", "key", "int", "str"],
)
def test_orbax_restores_a_tree_that_is_one_leaf(state: Any, how: str, tmp_path: Path) -> None:
    jct.save(tmp_path / "a", state)
    export(tmp_path / "a", tmp_path / "run" / "12")
    assert_same_content(RESTORES[how](tmp_path / "run" / "12", blank(state)), state)
    assert_same(jct.load(tmp_path / "run" / "12", blank(state)), state)


def test_export_with_complex_number_is_restored(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"c": 1 + 2j, "w": np.arange(3.0)})
    export(tmp_path / "a", tmp_path / "5")
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "5" / "state"), {"c": np.array(1 + 2j), "w": np.arange(3.0)})
    assert jct.load(tmp_path / "5", {"c": 0j, "w": np.zeros(3)})["c"] == 1 + 2j


def test_orbax_knows_the_metrics_of_what_was_exported(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        for step, loss in {1: float("nan"), 2: 0.5, 3: float("inf")}.items():
            manager.save(step, {"state": {"w": np.arange(3.0)}}, metrics={"loss": loss, "steps": step})
            manager.wait()
            export(Path(manager.path(step)), tmp_path / "o" / str(step))
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "o", options=best) as manager:
        assert repr(manager.metrics(1)) == "{'loss': nan, 'steps': 1.0}"
        assert repr(manager.metadata(1).metrics) == "{'loss': nan, 'steps': 1.0}"
        assert manager.metrics(3) == {"loss": float("inf"), "steps": 3.0}
        assert manager.best_step() == 2
    with ocp1.training.Checkpointer(tmp_path / "o") as checkpointer:
        assert checkpointer.checkpoints[1].metrics == {"loss": 0.5, "steps": 2.0}
    assert jct.metadata(tmp_path / "o" / "2").metrics == {"loss": 0.5, "steps": 2.0}


def test_checkpointable_named_metrics_is_kept(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(1, {"metrics": {"w": np.arange(3.0)}}, metrics={"loss": 0.5})
        manager.wait()
        assert export(Path(manager.path(1)), tmp_path / "1") == "metrics"
    assert not (tmp_path / "1" / "metrics" / "metrics").exists()
    assert np.array_equal(jct.load(tmp_path / "1")["w"], np.arange(3.0))


@pytest.mark.parametrize("item", ["../evil", "a/b", "", "metrics"])
def test_invalid_item_name_is_refused(item: str, tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(2)})
    with pytest.raises(jct.SettingsError, match="the item of 'state'"):
        export(tmp_path / "a", tmp_path / "5", item)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def assert_same_content(found: Any, expected: Any) -> None:
    """Fail unless two trees are equal; Orbax commits arrays, and returns Python numbers as its own scalars."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(wanted, jax.Array):
            assert leaf.sharding == wanted.sharding
        if isinstance(wanted, jax.Array | np.ndarray):
            assert (leaf.dtype, leaf.shape, raw(leaf)) == (wanted.dtype, wanted.shape, raw(wanted))
        else:
            assert leaf == wanted


def test_item_has_a_name_of_its_own(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "a", {"state": {"w": np.arange(3.0)}}, custom_metadata={"run": "a"})
    assert export(tmp_path / "a", tmp_path / "5", "params") == "params"
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(5, args=ocp.args.Composite(params=ocp.args.PyTreeRestore()))
        assert np.array_equal(found["params"]["w"], np.arange(3.0))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": b"bytes"}, "leaf 'a': .* bytes"),
        ({}, "expected a tree with leaves"),
        (None, "expected a tree with leaves"),
        ({"a": 2**70}, "leaf 'a': .* integers beyond 64 bits"),
        ({"a": {"b": 1}, "a.b": 2}, "leaves 'a/b' and 'a.b' would both be called 'a.b' by Orbax"),
    ],
)
def test_inexpressible_values_are_refused_before_writing(tmp_path: Path, state: Any, message: str) -> None:
    jct.save(tmp_path / "a", state)
    with pytest.raises(jct.MismatchError, match=message):
        export(tmp_path / "a", tmp_path / "5")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_failed_export_leaves_no_files(tmp_path: Path) -> None:
    # TensorStore still writes the others when the last one turns out to be damaged.
    jct.save(tmp_path / "a", {f"v{number:03}": np.arange(100_000.0) + number for number in range(100)})
    (segment,) = (tmp_path / "a" / "state").glob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-8] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(jct.CorruptCheckpointError):
        export(tmp_path / "a", tmp_path / "5")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]
