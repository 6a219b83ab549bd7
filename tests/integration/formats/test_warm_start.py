"""Warm starts: a fresh run takes its state from a checkpoint of any origin, whole or in part, and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import save_file

import jaxckpt_train as jct
from tests.support.same_trees import raw

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
LAYERS = [np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32) for seed in range(3)]


def fresh() -> dict[str, Any]:
    return {"params": {"layers": jnp.zeros((3, 6, 4), jnp.bfloat16), "head": jnp.ones(5)}, "step": jnp.int32(0)}


def run(directory: Path, updates: int, **options: Any) -> list[dict[str, Any]]:
    """Run a loop, and return its first state and the state after each update."""
    states = []
    with jct.CheckpointCallback(directory, save_interval_steps=1, progress=False, **options) as ckpt:
        state = ckpt.resume(fresh())
        states.append(state)
        for _ in ckpt.steps(updates):
            state = jax.tree.map(lambda leaf: leaf + 1, state)
            ckpt(state)
            states.append(state)
    return states


TRANSFORMS = [
    {"op": "rename", "leaves": "h.*.weight", "to": "h/*"},
    {"op": "stack", "leaves": "h/{}", "to": "params/layers"},
    {"op": "transpose", "leaves": "params/layers", "axes": [0, 2, 1]},
    {"op": "cast", "leaves": "params/layers", "dtype": "bfloat16"},
]


def weights(folder: Path) -> Path:
    """Write weights with the names and layout of another tool."""
    save_file({f"h.{number}.weight": layer for number, layer in enumerate(LAYERS)}, folder / "model.safetensors")
    return folder


def test_run_begins_with_foreign_weights_and_keeps_rest(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    given = {"path": str(weights(folder)), "transforms": TRANSFORMS, "only": "params/layers"}
    first = run(tmp_path / "run", 2, init_from=given)
    assert raw(first[0]["params"]["layers"]) == raw(np.stack([layer.T for layer in LAYERS]).astype(jnp.bfloat16))
    assert first[0]["params"]["head"].tolist() == [1.0] * 5
    second = run(tmp_path / "run", 3, init_from=given)
    assert raw(second[0]["params"]["layers"]) == raw(first[2]["params"]["layers"]), (
        "the run resumes from its own step by now"
    )
    assert int(second[0]["step"]) == 2


def test_run_starts_from_orbax_step(tmp_path: Path) -> None:
    state = jax.tree.map(lambda leaf: leaf + 3, fresh())
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(7, args=ocp.args.StandardSave(state))
    (first,) = run(tmp_path / "run", 0, init_from=tmp_path / "orbax" / "7")
    assert jax.tree.map(raw, first) == jax.tree.map(raw, state)


def test_warm_start_is_configured_in_yaml(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    text = f"""
directory: {tmp_path}/run
init_from:
  path: {weights(folder)}
  only: params/layers
  transforms:
    - {{op: rename, leaves: h.*.weight, to: h/*}}
    - {{op: stack, leaves: "h/{{}}", to: params/layers}}
    - {{op: transpose, leaves: params/layers, axes: [0, 2, 1]}}
    - {{op: cast, leaves: params/layers, dtype: bfloat16}}
"""
    with jct.CheckpointCallback.from_config(OmegaConf.create(text)) as ckpt:
        state = ckpt.resume(fresh())
    assert raw(state["params"]["layers"]) == raw(np.stack([layer.T for layer in LAYERS]).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transforms": []}, "checkpoint.init_from: expected the key .path. .*, found transforms"),
        ({"path": "a", "onyl": "b"}, 'checkpoint.init_from: unknown key "onyl", did you mean "only"'),
        ({"path": "a", "missing": "maybe"}, 'checkpoint.init_from: missing: expected "error" or "keep"'),
        (
            {"path": "a", "transforms": [{"op": "cut"}]},
            r"checkpoint.init_from.transforms: operation 1 of 1: op: expected one of",
        ),
        (7, "checkpoint.init_from: expected"),
    ],
)
def test_wrong_source_is_refused_by_the_constructor(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError, match=message):
        jct.CheckpointCallback(tmp_path, init_from=given)
