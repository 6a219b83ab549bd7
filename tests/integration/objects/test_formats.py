"""Other tools' formats on object stores: read, imported and exported, and compared with local files."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from jaxckpt_train.errors import NotACheckpointError, SettingsError, StorageError
from tests.support.objects.faults import Action, Fail, Faults, Request
from tests.support.objects.stand_in import StandIn

TREE = {
    "layer": {"kernel": np.arange(2_750_000, dtype=np.float32).reshape(1100, 2500), "bias": jnp.ones(7, jnp.bfloat16)},
    "count": np.arange(5),
}
WHOLE = {"layer.kernel": TREE["layer"]["kernel"], "count": TREE["count"]}


all_dialects = pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)


def keys_of(cloud: StandIn) -> list[str]:
    return sorted(each["path"] for batch in obstore.list(cloud.access.store()) for each in batch)


def upload(cloud: StandIn, folder: Path, key: str) -> None:
    for file in (each for each in folder.rglob("*") if each.is_file()):
        obstore.put(cloud.access.store(), f"{key}/{file.relative_to(folder)}", file)


def download(cloud: StandIn, key: str, folder: Path) -> Path:
    for name in (each for each in keys_of(cloud) if each.startswith(key)):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(obstore.get(cloud.access.store(), name).bytes()))
    return folder / key


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def assert_same(found: Any, expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        else:
            assert np.asarray(found[name]).dtype == np.asarray(value).dtype
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def write_shards(folder: Path) -> None:
    """Write a model of two files with an index."""
    names = {"layer.kernel": "model-00001-of-00002.safetensors", "count": "model-00002-of-00002.safetensors"}
    for tensor, name in names.items():
        save_file({tensor: WHOLE[tensor]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


class FailAt(Faults):
    """Refuse all requests that create an object with a text in its key."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decide(self, request: Request) -> Action | None:
        return Fail(403) if request.method == "PUT" and self.text in request.key else None


@all_dialects
def test_safetensors_file_is_read(cloud: StandIn, tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "model.safetensors")
    upload(cloud, tmp_path, "m")
    local = jct.load(tmp_path / "model.safetensors")
    assert_same(jct.load(cloud.url("m/model.safetensors")), local)
    assert_same(jct.load(cloud.url("m")), local)
    like = {"count": np.zeros(5, np.int64)}
    assert_same(jct.load(cloud.url("m"), like, only="count"), {"count": WHOLE["count"]})
    assert jct.metadata(cloud.url("m")).bytes == jct.metadata(tmp_path / "model.safetensors").bytes


def test_safetensors_folder_with_index_is_read(cloud: StandIn, tmp_path: Path) -> None:
    write_shards(tmp_path)
    upload(cloud, tmp_path, "m")
    assert_same(jct.load(cloud.url("m")), jct.load(tmp_path))
    assert_same(jct.load(cloud.url("m/model.safetensors.index.json")), jct.load(tmp_path))


def test_large_read_stays_within_its_budget(cloud: StandIn, tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "model.safetensors")
    upload(cloud, tmp_path, "m")
    like = {"layer.kernel": np.zeros((1100, 2500), np.float64)}
    settings = jct.StoreSettings(read_budget_bytes=8 << 20)
    loaded = jct.load(cloud.url("m"), like, only="layer.kernel", cast=True, settings=settings)
    assert np.array_equal(loaded["layer.kernel"], WHOLE["layer.kernel"])
    ranges = [each.range for each in cloud.requests if each.method == "GET" and each.range]
    assert max(int(stop) - int(start) for start, stop in (span[6:].split("-") for span in ranges)) < 8 << 20


@all_dialects
def test_flax_files_are_read(cloud: StandIn, tmp_path: Path) -> None:
    state = {"w": np.arange(1000.0), "step": 3}
    for step in (3, 20):
        (tmp_path / f"checkpoint_{step}").write_bytes(serialization.to_bytes(state | {"step": step}))
    upload(cloud, tmp_path, "f")
    assert_same(jct.load(cloud.url("f")), state | {"step": 20})
    assert_same(jct.load(cloud.url("f/checkpoint_3")), state)


@pytest.mark.parametrize("item", [True, False])
def test_orbax_steps_are_read(cloud: StandIn, tmp_path: Path, item: bool) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(TREE))
    upload(cloud, tmp_path / "run", "run")
    where = "5/default" if item else "5"
    assert_same(jct.load(cloud.url(f"run/{where}")), jct.load(tmp_path / "run" / where))


def test_unreachable_orbax_arrays_are_not_called_damaged(cloud: StandIn, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "o", {"w": np.arange(2_000_000)})
    upload(cloud, tmp_path / "o", "o")
    cloud.faults = RefuseData()
    settings = jct.StoreSettings(object_store=jct.settings.ObjectStoreSettings(retries=0))
    with pytest.raises(StorageError) as raised:
        jct.load(cloud.url("o"), settings=settings)
    assert raised.value.errno == errno.EACCES


class RefuseData(Faults):
    """Refuse to read the data of a database of Orbax."""

    def decide(self, request: Request) -> Action | None:
        return Fail(403) if request.method == "GET" and "/d/" in request.key else None


def test_pytorch_and_orbax_on_azure_say_what_to_do(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "o", TREE)
    with StandIn("azure") as cloud, cloud.named():
        upload(cloud, tmp_path / "o", "o")
        obstore.put(cloud.access.store(), "t/.metadata", b"1")
        obstore.put(cloud.access.store(), "t/__0_0.distcp", b"1")
        with pytest.raises(SettingsError, match="local directory"):
            jct.load(cloud.url("o"))
        with pytest.raises(NotACheckpointError, match="download"):
            jct.load(cloud.url("t"))
        jct.save(cloud.url("ours"), TREE)
        before = keys_of(cloud)
        result = CliRunner().invoke(app, ["export", cloud.url("ours"), cloud.url("out"), "--to", "orbax"])
        assert result.exit_code == 2
        assert keys_of(cloud) == before


@all_dialects
def test_safetensors_are_exported(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(cloud.url("ours"), TREE)
    jct.save(tmp_path / "ours", TREE)
    run("export", cloud.url("ours"), cloud.url("one.safetensors"), "--to", "safetensors")
    run("export", cloud.url("ours"), cloud.url("folder"), "--to", "safetensors", "--shard-gb", "0.01")
    run("export", str(tmp_path / "ours"), str(tmp_path / "one.safetensors"), "--to", "safetensors")
    run("export", str(tmp_path / "ours"), str(tmp_path / "folder"), "--to", "safetensors", "--shard-gb", "0.01")
    there = download(cloud, "", tmp_path / "there")
    names = ["one.safetensors", *(f"folder/{file.name}" for file in (tmp_path / "folder").iterdir())]
    assert len(names) == 4
    for name in names:
        assert (there / name).read_bytes() == (tmp_path / name).read_bytes()
    written = [each.key for each in cloud.requests if each.method in ("PUT", "POST") and "folder/" in each.key]
    assert written[-1].endswith(".index.json")
    assert load_file(there / "one.safetensors")["layer.kernel"].tobytes() == WHOLE["layer.kernel"].tobytes()


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_export_refuses_a_taken_name_and_removes_what_failed(cloud: StandIn, form: str) -> None:
    jct.save(cloud.url("ours"), TREE)
    obstore.put(cloud.access.store(), "taken/file", b"1")
    before = keys_of(cloud)
    arguments = ["--to", form, *(["--shard-gb", "0.01"] if form == "safetensors" else [])]
    result = CliRunner().invoke(app, ["export", cloud.url("ours"), cloud.url("taken"), *arguments])
    assert result.exit_code != 0
    cloud.faults = FailAt("index.json" if form == "safetensors" else "_CHECKPOINT_METADATA")
    result = CliRunner().invoke(app, ["export", cloud.url("ours"), cloud.url("new"), *arguments])
    assert result.exit_code != 0
    assert keys_of(cloud) == before


def test_orbax_is_exported(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(cloud.url("ours"), TREE)
    run("export", cloud.url("ours"), cloud.url("run/7"), "--to", "orbax", "--item", "default")
    written = [each.key for each in cloud.requests if each.method == "PUT" and each.key.startswith("run/7")]
    assert written[-1] == "run/7/commit_success.txt"
    assert_same(jct.load(cloud.url("run/7")), jct.load(cloud.url("ours")))
    folder = download(cloud, "run", tmp_path)
    with ocp.CheckpointManager(folder, item_names=("default",)) as manager:
        found = manager.restore(7, args=ocp.args.Composite(default=ocp.args.StandardRestore()))
    assert_same(found["default"], TREE)


@all_dialects
def test_import_to_and_from_urls(cloud: StandIn, tmp_path: Path) -> None:
    write_shards(tmp_path)
    upload(cloud, tmp_path, "m")
    run("import", cloud.url("m"), cloud.url("ours"))
    run("import", cloud.url("m"), str(tmp_path / "ours"))
    run("import", str(tmp_path), cloud.url("second"))
    for place in (cloud.url("ours"), tmp_path / "ours", cloud.url("second")):
        assert jct.verify(place).ok
        assert_same(jct.load(place), WHOLE)


def test_transforms_apply_to_urls(cloud: StandIn, tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "model.safetensors")
    upload(cloud, tmp_path, "m")
    transforms = [
        {"op": "rename", "leaves": "layer.kernel", "to": "w"},
        {"op": "cast", "leaves": "w", "dtype": "float16"},
    ]
    assert_same(
        jct.load(cloud.url("m"), transforms=transforms),
        jct.load(tmp_path / "model.safetensors", transforms=transforms),
    )
