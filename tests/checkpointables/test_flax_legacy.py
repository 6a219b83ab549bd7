"""Files that Flax wrote with msgpack load as checkpoints do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, serialization
from flax.training.train_state import TrainState

import jaxckpt_train as jct
from jaxckpt_train.settings import NonFinite


def train_state(seed: int) -> TrainState:
    model = linen.Dense(3)
    params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    params["half"] = jax.random.normal(jax.random.key(seed), (5,), jnp.bfloat16)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))


def raw(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_train_state_written_by_flax_loads_into_a_live_one(tmp_path: Path) -> None:
    saved, target = train_state(0), train_state(1)
    path = tmp_path / "checkpoint_1"
    path.write_bytes(serialization.to_bytes(saved))
    loaded = jct.load(path, target)
    assert jax.tree.structure(loaded) == jax.tree.structure(target)
    assert raw(loaded) == raw(saved) != raw(target)
    assert type(loaded.step) is type(target.step)


def test_without_a_target_it_is_nested_dicts_of_numpy_arrays(tmp_path: Path) -> None:
    saved = {"layers": [{"w": np.arange(4.0)}, {"w": np.ones((2, 2), np.int8)}], "name": "x"}
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes(saved))
    loaded = jct.load(path)
    assert loaded["name"] == "x"
    assert loaded["layers"][1]["w"].tobytes() == saved["layers"][1]["w"].tobytes()


@pytest.mark.parametrize("nonfinite", ["warn", "reject"])
def test_what_saves_may_not_hold_is_loaded(
    tmp_path: Path, nonfinite: NonFinite, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.array([1.0, np.nan])}))
    loaded = jct.load(path, settings=jct.StoreSettings(nonfinite=nonfinite))
    assert np.isnan(loaded["w"][1])
    assert caplog.text == ""


def test_a_difference_is_reported_as_for_any_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.ones(3, np.float32)}))
    with pytest.raises(jct.MismatchError, match=r"leaf 'w': saved float32\[3\], wanted float32\[4\]"):
        jct.load(path, {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a checkpoint at all")
    with pytest.raises(jct.NotACheckpointError, match="found a file that is neither"):
        jct.load(path)
