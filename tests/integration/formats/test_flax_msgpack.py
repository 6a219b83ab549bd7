"""Files that Flax wrote with msgpack load as checkpoints do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from flax import linen, serialization
from flax.training.train_state import TrainState

import jaxckpt_train as jct
from jaxckpt_train.settings import NonFinite
from tests.support.in_time import in_time


def train_state(seed: int) -> TrainState:
    model = linen.Dense(3)
    params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    params["half"] = jax.random.normal(jax.random.key(seed), (5,), jnp.bfloat16)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))


def raw(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_train_state_of_flax_loads_into_target(tmp_path: Path) -> None:
    saved, target = train_state(0), train_state(1)
    path = tmp_path / "checkpoint_1"
    path.write_bytes(serialization.to_bytes(saved))
    loaded = jct.load(path, target)
    assert jax.tree.structure(loaded) == jax.tree.structure(target)
    assert raw(loaded) == raw(saved) != raw(target)
    assert type(loaded.step) is type(target.step)


def test_load_without_target_gives_nested_dicts(tmp_path: Path) -> None:
    saved = {"layers": [{"w": np.arange(4.0)}, {"w": np.ones((2, 2), np.int8)}], "name": "x"}
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes(saved))
    loaded = jct.load(path)
    assert loaded["name"] == "x"
    assert loaded["layers"][1]["w"].tobytes() == saved["layers"][1]["w"].tobytes()


@pytest.mark.parametrize("nonfinite", ["warn", "reject"])
def test_nonfinite_setting_does_not_affect_loads(
    tmp_path: Path, nonfinite: NonFinite, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.array([1.0, np.nan])}))
    loaded = jct.load(path, settings=jct.StoreSettings(nonfinite=nonfinite))
    assert np.isnan(loaded["w"][1])
    assert caplog.text == ""


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a checkpoint at all")
    with pytest.raises(jct.NotACheckpointError, match=f"{path}: expected .*, found another file"):
        jct.load(path)


def packed(kind: int, content: Any) -> msgpack.ExtType:
    """One of Flax's own extensions: 1 an array, 2 a complex number, 3 a numpy scalar."""
    return msgpack.ExtType(kind, msgpack.packb(content))


def nested(levels: int, begin: bytes) -> bytes:
    return b"\x81\xa1a" + begin * levels + b"\x01"


def test_file_larger_than_memory_is_refused_with_size(tmp_path: Path) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.ones(3)}))
    os.truncate(path, 1 << 42)
    with pytest.raises(jct.StorageError, match=f"4398046511104 bytes .*: '{path}'"):
        jct.load(path)


MALFORMED = {
    "a dtype that is no Python": msgpack.packb({"w": packed(1, ([1], "(1,,)i4", b""))}),
    "a dtype that is none": msgpack.packb({"w": packed(3, ([1], "no dtype", b""))}),
    "half a complex number": msgpack.packb({"w": packed(2, ("a",))}),
    "a part of an array": msgpack.packb({"w": packed(1, ([1],))}),
    "chunks that are none": msgpack.packb({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": 1}}),
    "a shape of 64 bits": msgpack.packb({"w": packed(1, ([2**64 - 1], "float32", b""))}),
    "300 maps": nested(300, b"\x81\xa1a"),
    "500 maps": nested(500, b"\x81\xa1a"),
    "900 maps": nested(900, b"\x81\xa1a"),
    "5000 maps": nested(5000, b"\x81\xa1a"),
    "900 lists": nested(900, b"\x91"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_raises_only_our_errors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(data)
    with in_time(), pytest.raises(jct.CheckpointError, match=f"{path}: |leaf 'a/0/0"):
        jct.load(path)


def test_file_of_most_allowed_levels_loads(tmp_path: Path) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(nested(199, b"\x81\xa1a"))
    loaded = jct.load(path)
    for _ in range(200):
        loaded = loaded["a"]
    assert loaded == 1


@pytest.mark.skipif(
    tuple(map(int, flax.__version__.split(".")[:2])) < (0, 12), reason="before 0.12 Flax refuses keys that are not text"
)
@pytest.mark.parametrize("tree", [{"params": {1: 2, "b": 3}}, {"params": [{1: 2, "b": 3}]}])
def test_unsortable_keys_do_not_reduce_recursion_limit(tmp_path: Path, tree: Any) -> None:
    """Each failing comparison in JAX lowers the recursion limit of its thread by one: a thousand would exhaust it."""

    def levels(depth: int = 0) -> int:
        try:
            return levels(depth + 1)
        except RecursionError:
            return depth

    file = tmp_path / "mixed.msgpack"
    file.write_bytes(msgpack.packb(tree))
    before = levels()
    for _ in range(20):
        with pytest.raises(jct.CorruptCheckpointError, match=f"{file}: .*map keys"):
            jct.load(file)
    assert levels() == before


def test_json_file_error_asks_for_folder(tmp_path: Path) -> None:
    jct.save(tmp_path / "ours", {"w": np.ones(3)})
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model_index.json"):
        (tmp_path / "hf" / name).write_text('{"a": 1}')
    for path in (*tmp_path.glob("ours/*.json"), *tmp_path.glob("hf/*.json")):
        with pytest.raises(jct.NotACheckpointError, match=f"found a JSON file; .*, {path.parent}$"):
            jct.load(path)
    assert list(tmp_path.glob("ours/*.json"))
