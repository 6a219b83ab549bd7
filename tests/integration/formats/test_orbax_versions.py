"""Checkpoints that Orbax versions since 0.1 have written are loaded bit for bit, and damage raises an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxckpt_train as jct
from jaxckpt_train.formats.orbax_read import decode_aggregate
from jaxckpt_train.pytree.flatten import flatten
from tests.support import paths
from tests.support.commands import json_of, refused
from tests.support.orbax_golden import assert_item, blank, expected_items, path_of
from tests.support.same_trees import assert_same, raw

GOLDEN = paths.GOLDEN / "orbax"
FORMS = sorted(path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*/expected.json"))
TREES = [form for form in FORMS if not form.endswith(("keys", "array"))]


def loaded_items(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Load all items by their saved names; a tree that is no item of a step may have another name."""
    found = jct.load_checkpointables(path)
    return dict(zip(expected, found.values(), strict=True)) if len(expected) == 1 else found


def test_golden_files_cover_versions_and_forms() -> None:
    assert {form.partition("/")[0] for form in FORMS} >= {"0.1.8", "0.2.7", "0.3.5", "0.4.8", "0.5.23", "0.12.8"}
    assert {form.partition("/")[2] for form in FORMS} >= {"zarr", "ocdbt", "zarr3", "aggregate", "manager", "flax"}


@pytest.mark.parametrize("form", FORMS)
def test_every_item_loads_equal_without_a_target(form: str) -> None:
    expected = expected_items(GOLDEN / form)
    found = loaded_items(path_of(GOLDEN / form), expected)
    if form == "0.11.40/array":  # the metadata of later versions puts the array into a mapping
        found = {"state": found["state"]["checkpoint"]}
    if form.endswith("/keys"):
        found["typed"] = jax.random.key_data(found["typed"])
    for name, item in expected.items():
        assert_item(found[name], item, f"{form}: {name}")


@pytest.mark.parametrize("form", TREES)
def test_every_tree_loads_equal_into_a_target(form: str) -> None:
    path = path_of(GOLDEN / form)
    expected = {name: item for name, item in expected_items(GOLDEN / form).items() if name != "config"}
    for name, item in expected.items():
        where = jct.metadata(path).checkpointables.keys() - {"config"} if len(expected) == 1 else [name]
        (there,) = where
        target = jax.tree.map(blank, item)
        assert_same(jct.load_checkpointables(path, {there: target})[there], item)
        if len(expected) == 1 or name == "state":
            assert_same(jct.load(path, target), item)


@pytest.mark.parametrize("form", TREES)
def test_every_tree_is_shown_and_imported(form: str, tmp_path: Path) -> None:
    path = path_of(GOLDEN / form)
    shown = json_of("show", path)
    assert shown["kind"] == "Orbax"
    expected = {name: item for name, item in expected_items(GOLDEN / form).items() if name != "config"}
    parts = {each["part"] for each in shown["leaves"]}
    leaves = sum(len(flatten(item).names) for item in expected.values())
    assert (len(parts), len(shown["leaves"])) == (len(expected), leaves)
    assert json_of("import", path, tmp_path / "ours")["kind"] == "Orbax"
    assert jct.verify(tmp_path / "ours").ok
    for name, item in loaded_items(tmp_path / "ours", expected_items(GOLDEN / form)).items():
        assert_item(item, expected_items(GOLDEN / form)[name], f"{form}: {name}")


@pytest.mark.parametrize("form", [form for form in FORMS if form.endswith(("/flax", "/train-state"))])
def test_a_train_state_of_flax_is_restored(form: str) -> None:
    expected = expected_items(GOLDEN / form)["state"]
    params = jax.tree.map(blank, expected["params"])
    state = TrainState.create(apply_fn=len, params=params, tx=optax.adam(1e-3))
    found = jct.load(path_of(GOLDEN / form), state)
    assert found.step == expected["step"] == 1
    moments = expected["opt_state"][0]
    assert raw(found.params["Dense_0"]["kernel"]) == raw(expected["params"]["Dense_0"]["kernel"])
    assert raw(found.opt_state[0].nu["Dense_0"]["bias"]) == raw(moments.nu["Dense_0"]["bias"])
    assert found.opt_state[0].count == moments.count


def test_steps_of_first_versions_are_not_skipped(tmp_path: Path) -> None:
    for form, name in (("0.1.8/manager", "7"), ("0.2.7/flax", "checkpoint_7")):
        run = tmp_path / name
        shutil.copytree(GOLDEN / form / "saved", run)
        with pytest.raises(jct.NotACheckpointError, match=rf"Orbax run .*/{name},"):
            jct.load(run)
        assert "Orbax run" in refused("show", run, code=3)
        found = "found steps of Orbax, the last ones 7,"
        with pytest.raises(jct.SettingsError, match=found), jct.CheckpointCallback(run) as ckpt:
            ckpt.resume({"w": np.zeros(3)})
    metadata = jct.metadata(tmp_path / "7" / "7")
    assert (metadata.step, metadata.metrics) == (7, {"loss": 0.25})


def test_part_of_an_old_tree_goes_to_devices() -> None:
    path = path_of(GOLDEN / "0.2.7/zarr")
    expected = expected_items(GOLDEN / "0.2.7/zarr")["state"]["params"]["kernel"]
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y", None))
    found = jct.load(path, only="params/kernel", shardings=sharding)["params"]["kernel"]
    assert found.sharding == sharding
    assert raw(found) == raw(expected)


# A file named `checkpoint` in a directory need not be of Orbax.


@pytest.mark.parametrize(
    "content",
    [
        b'model_checkpoint_path: "ckpt-3"\n',
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
        b"\x93NUMPY\x01\x00v\x00{'descr'",
        b"\x89HDF\r\n\x1a\n",
        b"PK\x03\x04",
        b"",
        b"\x82",
    ],
    ids=["tensorflow", "pickle", "numpy", "hdf5", "zip", "nothing", "a head"],
)
def test_other_files_of_that_name_are_left_alone(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint").write_bytes(content)
    with pytest.raises(jct.NotACheckpointError) as caught:
        jct.load(tmp_path / "a")
    assert "Orbax" not in str(caught.value)
    (tmp_path / "run").mkdir()
    (tmp_path / "a").rename(tmp_path / "run" / "3")
    with pytest.raises(jct.NotACheckpointError) as caught:
        jct.load(tmp_path / "run")
    assert "Orbax" not in str(caught.value)


def test_safetensors_next_to_such_file_are_loaded(tmp_path: Path) -> None:
    jct.save(tmp_path / "ours", {"w": np.arange(3.0)})
    (segment,) = (tmp_path / "ours" / "state").glob("*.safetensors")
    shutil.copytree(path_of(GOLDEN / "0.2.7/flax"), tmp_path / "both")
    shutil.copy(segment, tmp_path / "both" / "model.safetensors")
    assert list(jct.load(tmp_path / "both")) == ["w"]


# Damage.


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "0.2.7" / "zarr" / "saved", tmp_path / "old")
    return tmp_path / "old"


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the structure in the file of the tree."""
    tree = msgspec.msgpack.decode((path / "checkpoint").read_bytes())
    change(tree)
    (path / "checkpoint").write_bytes(msgspec.msgpack.encode(tree))


def test_truncated_structure_is_reported(tmp_path: Path) -> None:
    source = path_of(GOLDEN / "0.1.8/aggregate")
    whole = (source / "checkpoint").read_bytes()
    for end in range(3, len(whole), 7):
        path = tmp_path / str(end) / "item"
        path.mkdir(parents=True)
        (path / "checkpoint").write_bytes(whole[:end])
        with pytest.raises(jct.CorruptCheckpointError, match=f"{end}/item/checkpoint: "):
            jct.load(path)


def test_flipped_bits_raise_only_package_errors(tmp_path: Path) -> None:
    whole = (path_of(GOLDEN / "0.1.8/aggregate") / "checkpoint").read_bytes()
    failures = 0
    for bit in range(0, len(whole) * 8, 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        try:
            decode_aggregate(bytes(data), "a")
        except (jct.CorruptCheckpointError, jct.UnsupportedLeafError):
            failures += 1
    assert failures > len(whole) // 10


def test_array_missing_is_reported_by_leaf(old: Path) -> None:
    shutil.rmtree(old / "params.kernel")
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'params/kernel': the array 'params\.kernel' can"):
        jct.load(old)


@pytest.mark.parametrize("name", ["../../x", "a/../../x", "/etc/x", ".."])
def test_nothing_outside_of_the_checkpoint_is_read(name: str, old: Path) -> None:
    shutil.copytree(old / "params.kernel", old.parent.parent / "x", dirs_exist_ok=True)
    changed(old, lambda tree: tree["params"].update(kernel=f"PLACEHOLDER://{name}"))
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'params/kernel': .* outside"):
        jct.load(old)
    shutil.rmtree(old.parent.parent / "x")


def test_later_metadata_reads_nothing_outside_of_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "item"
    shutil.copytree(GOLDEN / "0.4.8" / "zarr" / "saved", path)
    shutil.copytree(path / "params.kernel", tmp_path / "x")
    text = (path / "_METADATA").read_text()
    key = '"key_metadata": [{"key": "count", "key_type": 2}]'
    assert key in text
    (path / "_METADATA").write_text(text.replace(key, '"key_metadata": [{"key": "../x", "key_type": 2}]'))
    with pytest.raises(jct.CorruptCheckpointError, match=r"'\.\./x' is outside"):
        jct.load(path)


def test_array_of_another_shape_is_reported(old: Path) -> None:
    expected = expected_items(GOLDEN / "0.2.7" / "zarr")["state"]
    shutil.rmtree(old / "params.kernel")
    shutil.copytree(old / "params.half", old / "params.kernel")
    with pytest.raises(jct.MismatchError, match=r"'params/kernel': saved bfloat16\[2,4\], wanted float32\[4,6\]"):
        jct.load(old, jax.tree.map(blank, expected))
    zarray = old / "moments.1.0" / ".zarray"
    zarray.write_text(zarray.read_text().replace('"shape":[2,2]', '"shape":[2,2,2]'))
    with pytest.raises(jct.CorruptCheckpointError, match=r"leaf 'moments/1/0': the array 'moments\.1\.0' can"):
        jct.load(old)


def test_metadata_of_unknown_leaves_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "item"
    shutil.copytree(path_of(GOLDEN / "0.4.8/flax"), path)
    changed(path, lambda tree: tree.pop("step"))
    with pytest.raises(jct.CorruptCheckpointError, match="checkpoint: has no leaf 'step'"):
        jct.load(path)
    (path / "checkpoint").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"checkpoint: has no leaf"):
        jct.load(path)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({1: 2}, "below '~': expected text as map keys, found 1"),
        (msgspec.msgpack.Ext(1, b"\x01"), "leaf 'a': expected an array or a number"),
        (
            msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[2], "float32", b"1234"])),
            r"shape \[2\] does not fit 1 elements",
        ),
        (msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[-1], "float32", b"1234"])), "does not fit 1 elements"),
        (msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[0, 2**62], "int8", b""])), "does not fit 0 elements"),
        (msgspec.msgpack.Ext(3, msgspec.msgpack.encode([[], "object", b""])), "expected .* found 'object'"),
        (msgspec.msgpack.Ext(9, b""), "expected .* extension type 1, 2 or 3, found 9"),
        (msgspec.msgpack.Ext(2, b"\x91\x01"), "expected an array or a number"),
        ({"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": {}}, "expected the pieces of an array"),
        ({"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": 5}, "expected the pieces of an array"),
    ],
)
def test_malformed_aggregate_is_reported(node: Any, message: str) -> None:
    tree = node if node == {1: 2} else {"a": node}
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        decode_aggregate(msgspec.msgpack.encode(tree), "file")


def test_tree_that_is_too_deep_is_reported() -> None:
    for depth in (300, 100_000):
        with pytest.raises(jct.CorruptCheckpointError, match=r"at most 200 levels|recursion"):
            decode_aggregate(b"\x81\xa1a" * depth + b"\x01", "file")


def test_an_array_in_pieces_is_put_together() -> None:
    pieces = {
        str(at): msgspec.msgpack.Ext(1, msgspec.msgpack.encode([[3], "int16", np.arange(at, at + 3, dtype="i2").data]))
        for at in (0, 1)
    }
    tree = {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": pieces}}
    found = decode_aggregate(msgspec.msgpack.encode(tree), "file").held["a"]
    assert found.tolist() == [[0, 1, 2], [1, 2, 3]]
