"""Damaged steps that Orbax itself has written: loading a damaged item raises an error, and the others are loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp1

import jaxckpt_train as jct
from jaxckpt_train.formats import tensorstore_reads
from tests.support.commands import refused, run
from tests.support.same_trees import raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
STATE = {"w": np.arange(1, 1201, dtype=np.float32).reshape(40, 30), "key": jax.random.key(3), "rate": 0.5, "n": 3}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def by_handler(path: Path, **options: Any) -> Path:
    """Save in chunks of 10 rows and 15 columns, if the format has chunks."""
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=600), STATE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(STATE, save_args=save_args))
    return path


def by_second_interface(path: Path) -> Path:
    saving = ocp1.options.ArrayOptions.Saving(use_ocdbt=False)
    with ocp1.Context(array_options=ocp1.options.ArrayOptions(saving=saving)):
        ocp1.save(path, STATE)
    return path


def plain(path: Path) -> Path:
    return by_handler(path, use_ocdbt=False)


PLAIN: dict[str, Callable[[Path], Path]] = {
    "zarr": plain,
    "zarr3": lambda path: by_handler(path, use_ocdbt=False, use_zarr3=True),
    "v1": by_second_interface,
}


def chunks_of(path: Path, leaf: str) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and f"/{leaf}/" in str(file) and file.name[0].isdigit()]


def with_step_of(path: Path, **more: Any) -> Path:
    """Save a step with a tree, JSON and metrics, and return its path."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(path, options=options) as manager:
        items = {"state": ocp.args.StandardSave({"w": np.arange(4)}), "config": ocp.args.JsonSave({"a": [1, 2]})}
        manager.save(7, args=ocp.args.Composite(**items, **more), metrics={"loss": 0.25})
    return path / "7"


# Chunks.


@pytest.mark.parametrize("how", list(PLAIN))
def test_a_missing_chunk_is_damage_and_not_zeros(how: str, tmp_path: Path) -> None:
    path = PLAIN[how](tmp_path / "a")
    assert raw(jct.load(path)["w"]) == raw(STATE["w"])
    gone = chunks_of(path, "w")[0]
    gone.unlink()
    with pytest.raises(jct.CorruptCheckpointError) as caught:
        jct.load(path)
    assert "leaf 'w'" in str(caught.value)
    assert f'"{gone}"' in str(caught.value)
    assert jct.load(path, only="n") == {"n": 3}
    assert "is missing" in refused("import", path, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def test_missing_chunk_of_number_is_reported(tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    (path / "n" / "0").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'n' .*/n/0\" is missing"):
        jct.load(path)


def test_arrays_of_zeros_are_no_damage(tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}]):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(tmp_path / str(number), {"zeros": np.zeros((3, 5)), "n": 0})
        found = jct.load(tmp_path / str(number))
        assert raw(found["zeros"]) == raw(np.zeros((3, 5)))
        assert found["n"] == 0


@pytest.mark.parametrize("shape", [[41, 30], [80, 30], [40, 31], [4_000, 30_000]])
def test_shape_that_grew_is_reported(shape: list[int], tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    altered = json.loads((path / "w" / ".zarray").read_text()) | {"shape": shape}
    (path / "w" / ".zarray").write_text(json.dumps(altered))
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'w': box .* is missing"):
        jct.load(path)
    done = run("import", path, tmp_path / "out")
    assert (done.exit_code, "is missing" in done.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


def test_chunks_may_be_missing_without_fill_value_flag(tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    metadata = json.loads((path / "_METADATA").read_text())
    assert metadata.pop("store_array_data_equal_to_fill_value") is True
    (path / "_METADATA").write_text(json.dumps(metadata))
    (path / "w" / "0.0").unlink()
    assert not jct.load(path)["w"][:10, :15].any()


# Names.


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}], ids=["zarr", "zarr3"])
def test_array_without_name_is_in_item_itself(options: dict[str, Any], tmp_path: Path) -> None:
    trees: list[Any] = [np.arange(5), {"": np.arange(5), "b": np.ones(2)}, {"": {"c": np.arange(3)}, "a": {"": 7}}]
    for number, tree in enumerate(trees):
        path = tmp_path / str(number)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, **options)) as checkpointer:
            checkpointer.save(path, tree)
        assert jax.tree.all(jax.tree.map(np.array_equal, jct.load(path), tree))
        assert jax.tree.all(jax.tree.map(np.array_equal, jct.load(path, tree), tree))


def test_invalid_array_path_is_damage(tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    text = (path / "_METADATA").read_text()
    for name in (".", "a//b", "..", "/a"):
        (path / "_METADATA").write_text(
            text.replace('[{"key": "w", "key_type": 2}]', f'[{{"key": "{name}", "key_type": 2}}]')
        )
        with pytest.raises(jct.CorruptCheckpointError, match=f"the array '{name}'"):
            jct.load(path)


def test_any_name_is_a_key_of_a_database(tmp_path: Path) -> None:
    tree = {"..": np.arange(3), "../x": np.ones(2), "/a": np.zeros(2), "a/../b": np.ones(1), ".": np.arange(2)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
    assert jax.tree.all(jax.tree.map(np.array_equal, jct.load(tmp_path / "a"), tree))
    assert run("import", tmp_path / "a", tmp_path / "out").exit_code == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, jct.load(tmp_path / "out"), tree))


def test_negative_integer_keys_fit_target_as_others_do(tmp_path: Path) -> None:
    tree = {"a": {-1: np.arange(2), 5: np.arange(3), -12: np.ones(1)}, "b": {"-1": np.ones(2), "-x": np.ones(1)}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
    found = jct.load(tmp_path / "a", jax.tree.map(np.zeros_like, tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, tree))
    texts = {"a": {str(key): leaf for key, leaf in tree["a"].items()}, "b": tree["b"]}
    assert jax.tree.all(jax.tree.map(np.array_equal, jct.load(tmp_path / "a", texts), texts))
    assert list(jct.load(tmp_path / "a")["a"]) == [-12, -1, 5]


# Items that the metadata of the step names.


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "content"])
@pytest.mark.parametrize("name", ["config", "metrics", "state"])
def test_missing_item_is_reported_when_read(name: str, whole: bool, tmp_path: Path) -> None:
    path = with_step_of(tmp_path / "run", other=ocp.args.StandardSave({"v": np.ones(2)}))
    kept = {"state", "config", "other"} - {name}
    for file in [path / name] if whole else (path / name).iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != "commit_success.txt":
            file.unlink()
    message = rf"7/{name}: expected .*'\w+Handler', found {'no' if whole else 'an empty'} folder"
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        jct.load_checkpointables(path)
    assert f"7/{name}: expected" in refused("import", path, tmp_path / "all", code=1)
    assert list(jct.load_checkpointables(path, dict.fromkeys(kept))) == list(kept)
    assert run("import", path, tmp_path / "part", "--part", "other").exit_code == 0
    if name == "state":
        for target in (None, {"w": np.zeros(4, int)}):
            with pytest.raises(jct.CorruptCheckpointError, match=message):
                jct.load(path, target)
    else:
        assert raw(jct.load(path)["w"]) == raw(np.arange(4))


def test_tree_without_its_metadata_is_reported(tmp_path: Path) -> None:
    path = with_step_of(tmp_path / "run")
    (path / "state" / "_METADATA").unlink()
    (path / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"'StandardCheckpointHandler', found d, ocdbt"):
        jct.load(path)
    shutil.rmtree(path / "config")
    shutil.rmtree(path / "metrics")
    with pytest.raises(jct.CorruptCheckpointError, match="expected the files of"):
        jct.metadata(path)  # no item is left


def test_items_without_handler_are_not_missed(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run", item_names=("state", "data", "more")) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": np.arange(4)})))
    path = tmp_path / "run" / "7"
    assert list(jct.load_checkpointables(path)) == ["state"]
    step = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    step["item_handlers"] |= {"data": None, "mine": "my.package.MyHandler"}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(step))
    (path / "mine").mkdir()
    (path / "mine" / "content").write_bytes(b"of the user's own")
    assert list(jct.load_checkpointables(path)) == ["state"]


def test_json_by_another_name_is_read(tmp_path: Path) -> None:
    handlers = {"config": ocp.JsonCheckpointHandler(filename="c.json"), "state": ocp.StandardCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        items = {"state": ocp.args.StandardSave({"w": np.arange(4)}), "config": ocp.args.JsonSave({"a": 1})}
        manager.save(7, args=ocp.args.Composite(**items))
    assert jct.load_checkpointables(tmp_path / "7", {"config": None}) == {"config": jct.JsonValue({"a": 1})}


@pytest.mark.parametrize("is_second", [False, True], ids=["v0", "v1"])
def test_missing_data_position_is_reported(is_second: bool, tmp_path: Path) -> None:
    iterator = iter(grain.MapDataset.range(20).to_iter_dataset())
    next(iterator)
    if is_second:
        with ocp1.training.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_checkpointables(7, {"state": {"w": np.arange(4)}, "data": iterator})
    else:
        with ocp.CheckpointManager(tmp_path) as manager:
            items = {"state": ocp.args.StandardSave({"w": np.arange(4)})}
            manager.save(7, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator), **items))
    for file in (tmp_path / "7" / "data").glob("process_*"):
        file.unlink()
    for targets in (None, {"data": iterator}, {"state": None, "data": iterator}):
        with pytest.raises(jct.CorruptCheckpointError, match=r"7/data: .* empty folder"):
            jct.load_checkpointables(tmp_path / "7", targets)
    assert next(iterator) == 1
    assert raw(jct.load(tmp_path / "7")["w"]) == raw(np.arange(4))
    assert "7/data: expected" in refused("import", tmp_path / "7", tmp_path / "out", code=1)


def test_several_trees_are_chosen_from_by_part(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        trees = {name: ocp.args.StandardSave({"w": np.arange(4)}) for name in ("a", "b")}
        manager.save(7, args=ocp.args.Composite(**trees))
    message = refused("import", tmp_path / "run" / "7", tmp_path / "out", code=2)
    assert "'a', 'b'" in message
    assert "--part" in message


# Sizes: TensorStore ends the process if it gets no memory.


@pytest.mark.parametrize("how", ["zarr", "zarr3"])
@pytest.mark.parametrize("leaf", ["w", "n"])
@pytest.mark.parametrize("what", ["metadata", "chunk"])
def test_file_that_is_far_too_large_is_reported(how: str, leaf: str, what: str, tmp_path: Path) -> None:
    path = PLAIN[how](tmp_path / "a")
    if what == "metadata":
        file = path / leaf / (".zarray" if how == "zarr" else "zarr.json")
    else:
        file = next(
            each for each in (path / leaf).rglob("*") if each.is_file() and not each.name.startswith((".", "z"))
        )
    os.truncate(file, 1 << 40)
    with pytest.raises(jct.CorruptCheckpointError) as caught:
        jct.load(path)
    assert f"{file}: expected at most" in str(caught.value)
    assert "found 1,099,511,627,776" in str(caught.value)
    refused("import", path, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def test_database_that_is_far_too_large_is_reported(tmp_path: Path) -> None:
    path = by_handler(tmp_path / "a")
    os.truncate(path / "manifest.ocdbt", 1 << 40)
    with pytest.raises(jct.CorruptCheckpointError, match=r"manifest\.ocdbt: .* 1,099,511,627,776"):
        jct.load(path)


def test_chunks_far_larger_than_their_array_are_reported(tmp_path: Path) -> None:
    path = plain(tmp_path / "a")
    altered = json.loads((path / "w" / ".zarray").read_text()) | {"chunks": [100_000, 100_000]}
    (path / "w" / ".zarray").write_text(json.dumps(altered))
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'w': .* 40,000,000,000"):
        jct.load(path)
    refused("import", path, tmp_path / "out", code=1)


def test_chunks_larger_than_memory_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain(tmp_path / "a")
    monkeypatch.setattr(tensorstore_reads, "memory_bytes", lambda: 1199)
    with pytest.raises(jct.StorageError, match=r"leaf 'w': .* 1,200 bytes .* 1,199") as caught:
        jct.load(path)
    assert caught.value.errno == errno.ENOMEM
    monkeypatch.setattr(tensorstore_reads, "memory_bytes", lambda: 1200)
    assert raw(jct.load(path)["w"]) == raw(STATE["w"])
