"""Checkpoints that the real Orbax has written: each format of both interfaces loads equal, byte for byte."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp1
from safetensors.numpy import load_file

import jaxckpt_train as jct
from jaxckpt_train.formats import tensorstore_reads
from jaxckpt_train.integrations.orbax_manager import CheckpointManager
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.leaves import EMPTY
from tests.support.commands import run
from tests.support.model_states import STATES, llama, mesh
from tests.support.same_trees import assert_same, raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
Save = Callable[[Path, Any], Path]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def by_handler(**options: Any) -> Save:
    def save(path: Path, state: Any) -> Path:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, state)
        return path

    return save


def by_manager(path: Path, state: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(12, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    return path / "12"


def by_second_interface(path: Path, state: Any) -> Path:
    ocp1.save_pytree(path, state)
    return path


def by_training_checkpointer(path: Path, state: Any) -> Path:
    with ocp1.training.Checkpointer(path) as checkpointer:
        checkpointer.save_pytree(12, state)
    return path / "12"


SAVES: dict[str, Save] = {
    "ocdbt": by_handler(),
    "zarr": by_handler(use_ocdbt=False),
    "ocdbt, zarr3": by_handler(use_zarr3=True),
    "zarr3": by_handler(use_ocdbt=False, use_zarr3=True),
    "manager": by_manager,
    "v1": by_second_interface,
    "v1 training": by_training_checkpointer,
}


def blank(leaf: Any) -> Any:
    """A leaf of the same kind with other content, to load into."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(99)
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) if leaf.committed else leaf * 0
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return type(leaf)(not leaf) if isinstance(leaf, bool) else type(leaf)()


@pytest.mark.parametrize("how", list(SAVES))
@pytest.mark.parametrize("name", list(STATES))
def test_state_loads_equal_into_target_and_its_shardings(name: str, how: str, tmp_path: Path) -> None:
    state = STATES[name]()
    path = SAVES[how](tmp_path / "saved", state)
    target = jax.tree.map(blank, state)
    assert_same(jct.load(path, target), state)


@pytest.mark.parametrize("how", list(SAVES))
@pytest.mark.parametrize("name", list(STATES))
def test_a_state_loads_equal_without_a_target(name: str, how: str, tmp_path: Path) -> None:
    state = STATES[name]()
    path = SAVES[how](tmp_path / "saved", state)
    found, expected = flatten(jct.load(path)), flatten(state)
    leaves = dict(zip(found.names, found.leaves, strict=True))
    assert sorted(leaves) == sorted(expected.names)
    for path_, leaf in zip(expected.names, expected.leaves, strict=True):
        if leaf is None or leaf is EMPTY or isinstance(leaf, str | bool | int | float):
            assert leaves[path_] == leaf or (leaf is EMPTY and not leaves[path_]), path_
        else:
            assert raw(leaves[path_]) == raw(leaf), path_
            assert leaves[path_].dtype == leaf.dtype


def test_a_part_is_read_into_another_sharding(tmp_path: Path) -> None:
    state = llama()
    path = by_manager(tmp_path / "run", state)
    other = NamedSharding(mesh(), PartitionSpec(None, "tensor", "fsdp"))
    qkv = state["params"]["layers"]["attn"]["qkv"]
    found = jct.load(path, only="params/layers/attn/*", shardings=other)["params"]["layers"]["attn"]["qkv"]
    assert found.sharding == other
    assert raw(found) == raw(qkv)


def test_small_chunks_are_put_together(tmp_path: Path) -> None:
    state = {"w": np.arange(40 * 30, dtype=np.float32).reshape(40, 30), "v": np.arange(100, dtype=np.int16)}
    args = ocp.args.PyTreeSave(state, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=64), state))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(tmp_path / "a", args=args)
    assert_same(jct.load(tmp_path / "a"), state)
    shard = NamedSharding(mesh(), PartitionSpec("tensor", None))
    assert raw(jct.load(tmp_path / "a", shardings=shard)["w"]) == raw(state["w"])


def test_items_of_other_kinds_are_loaded(tmp_path: Path) -> None:
    config = {"rate": 0.1, "sizes": [1, 2]}
    with ocp.CheckpointManager(tmp_path) as manager:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave({"w": np.ones(3)}),
            config=ocp.args.JsonSave(config),
            key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
        )
        manager.save(5, args=items)
    found = jct.load_checkpointables(tmp_path / "5")
    assert found["config"] == jct.JsonValue(config)
    assert raw(found["key"]) == raw(jax.random.key(3))
    assert np.array_equal(jct.load(tmp_path / "5")["w"], np.ones(3))
    assert np.array_equal(jct.load(tmp_path / "5" / "state")["w"], np.ones(3))
    assert jct.metadata(tmp_path / "5").step == 5


def test_metrics_and_metadata_are_reported(tmp_path: Path) -> None:
    with ocp1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_pytree(7, {"w": np.ones(3)}, metrics={"loss": 0.25}, custom_metadata={"run": "a"})
    found = jct.metadata(tmp_path / "7")
    assert (found.step, found.metrics, found.custom_metadata) == (7, {"loss": 0.25}, {"run": "a"})
    (leaf,) = found.checkpointables["state"].leaves.values()
    assert (leaf.shape, leaf.dtype) == ((3,), np.dtype(np.float64))


def test_a_model_of_nnx_is_restored_in_place(tmp_path: Path) -> None:
    model, other = (nnx.Linear(3, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", nnx.state(model))
    jct.load(tmp_path / "a", other)
    assert raw(other.kernel[...]) == raw(model.kernel[...])


def test_digit_keys_take_key_type_of_target(tmp_path: Path) -> None:
    by_manager(tmp_path / "run", {"layers": {"0": np.ones(2), "1": np.zeros(2)}})
    texts = jct.load(tmp_path / "run" / "12", {"layers": {"0": np.zeros(2), "1": np.ones(2)}})
    assert np.array_equal(texts["layers"]["0"], np.ones(2))
    numbers = jct.load(tmp_path / "run" / "12", {"layers": {0: np.zeros(2), 1: np.ones(2)}})
    assert np.array_equal(numbers["layers"][0], np.ones(2))


def test_run_folder_or_unfinished_step_is_refused(tmp_path: Path) -> None:
    by_manager(tmp_path / "run", {"w": np.ones(3)})
    with pytest.raises(jct.NotACheckpointError, match=r"Orbax run .*/12,"):
        jct.load(tmp_path / "run")
    half = tmp_path / "13.orbax-checkpoint-tmp-1"
    (tmp_path / "run" / "12").rename(half)
    with pytest.raises(jct.NotACheckpointError, match="found an unfinished save"):
        jct.load(half)


def test_damage_is_reported_by_leaf(tmp_path: Path) -> None:
    path = by_handler(use_ocdbt=False)(tmp_path / "a", {"w": np.arange(1000.0), "v": np.ones(3)})
    (chunk,) = [file for file in (path / "w").iterdir() if file.name != ".zarray"]
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0xFF
    chunk.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'w': box \(\(0, 1000\),\)"):
        jct.load(path)
    assert np.array_equal(jct.load(path, only="v")["v"], np.ones(3))
    (path / "w" / ".zarray").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match="leaf 'w': the array 'w'"):
        jct.load(path)
    (path / "_METADATA").write_text('{"tree_metadata": 3}')
    with pytest.raises(jct.CorruptCheckpointError, match="_METADATA: "):
        jct.load(path)
    (path / "_METADATA").unlink()
    (path / "manifest.ocdbt").write_text("")
    with pytest.raises(jct.NotACheckpointError, match="expected _METADATA or checkpoint"):
        jct.load(path)


def test_fresh_run_next_to_orbax_steps_is_refused(tmp_path: Path) -> None:
    by_manager(tmp_path / "run", {"w": np.ones(3)})
    before = sorted(each.name for each in (tmp_path / "run").rglob("*"))
    message = r"found steps of Orbax, the last ones 12, .*init_from=.*/run/12"
    with pytest.raises(jct.SettingsError, match=message), jct.CheckpointCallback(tmp_path / "run") as ckpt:
        ckpt.resume({"w": np.zeros(3)})
    with pytest.raises(jct.SettingsError, match=message):
        CheckpointManager(tmp_path / "run")
    left = [each.name for each in (tmp_path / "run").rglob("*") if each.name in before]
    assert sorted(left) == before


def test_chunk_read_in_parts_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts, statistics and exports read in bands, and Orbax makes one chunk of an array on one device."""
    wide = np.arange(12 << 20, dtype=np.float32).reshape(3 << 10, 4 << 10)  # 48 MiB
    by_handler()(tmp_path / "orbax", {"wide": wide})
    jct.save(tmp_path / "ours", {"wide": wide + np.float32(1)})
    reads: list[str] = []
    read_box = tensorstore_reads.read_box

    def counted(subject: str, *more: Any) -> None:
        reads.append(subject)
        read_box(subject, *more)

    monkeypatch.setattr(tensorstore_reads, "read_box", counted)

    def once(*arguments: Any) -> None:
        reads.clear()
        assert run(*arguments).exit_code in (0, 1)
        assert len(reads) == 1

    once("stats", tmp_path / "orbax")
    once("diff", tmp_path / "orbax", tmp_path / "ours")
    once("import", tmp_path / "orbax", tmp_path / "cast", "--op", "cast ** float64")
    once("import", tmp_path / "orbax", tmp_path / "turned", "--op", "transpose wide")
    once("import", tmp_path / "orbax", tmp_path / "plain")
    once("export", tmp_path / "orbax", tmp_path / "hf", "--to", "safetensors", "--op", "cast ** float64")
    assert np.array_equal(jct.load(tmp_path / "cast")["wide"], wide.astype(np.float64))
    assert np.array_equal(jct.load(tmp_path / "turned")["wide"], wide.T)
    assert np.array_equal(jct.load(tmp_path / "plain")["wide"], wide)
    assert np.array_equal(load_file(tmp_path / "hf" / "model.safetensors")["wide"], wide.astype(np.float64))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1 << 62], "impossible shape"),
        ([0, 1 << 62], "impossible shape"),
        ([1 << 58], "expected at most 1,048,576 pieces"),
    ],
)
def test_array_of_claimed_huge_size_is_refused(tmp_path: Path, shape: list[int], message: str) -> None:
    path = by_handler(use_ocdbt=False)(tmp_path / "a", {"w": np.arange(4.0)})
    found = json.loads((path / "w" / ".zarray").read_text())
    changed = found | {"shape": shape, "chunks": [4] * len(shape)}
    (path / "w" / ".zarray").write_text(json.dumps(changed))
    with pytest.raises(jct.CorruptCheckpointError, match=f"leaf 'w'.*{message}"):
        jct.load(path)


def test_leaf_below_another_one_is_reported(tmp_path: Path) -> None:
    path = by_handler(use_ocdbt=False)(tmp_path / "a", {"w": np.arange(4.0), "w.x": np.arange(3.0)})
    found = json.loads((path / "_METADATA").read_text())
    keys = found["tree_metadata"]["('w.x',)"]["key_metadata"]
    keys[:] = [{"key": "w", "key_type": 2}, {"key": "x", "key_type": 2}]
    (path / "_METADATA").write_text(json.dumps(found))
    with pytest.raises(jct.CorruptCheckpointError, match="leaf 'w/x' is below leaf 'w'"):
        jct.load(path)
    assert run("import", path, tmp_path / "out").exit_code == 1
