"""Each process of a job writes an index file, and any other job, process or tool reads the checkpoint all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxckpt_train as jct
from tests.support.jobs.arrays import LOADED, SAVED, SHAPES, global_array, is_right, sharding_of, values_of
from tests.support.jobs.fixtures import JobOf

INDEXED = jct.StoreSettings(index_files=True)


def save_arrays(path: str, mesh: list[int], specs: dict[str, list[Any]]) -> None:
    tree = {name: global_array(shape, mesh, specs[name], dtype) for name, (shape, dtype) in SHAPES.items()}
    jct.save_checkpointables(path, {"state": tree, "data": {"position": 7}}, settings=INDEXED)


def load_arrays(path: str, mesh: list[int], specs: dict[str, list[Any]], read_once: bool) -> list[str]:
    """Load the arrays, and return the names of those that are wrong in this process."""
    places = {name: sharding_of(mesh, specs[name]) for name in SHAPES}
    target = {
        name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=places[name])
        for name, (shape, dtype) in SHAPES.items()
    }
    loaded = jct.load(path, target, settings=jct.StoreSettings(read_once=read_once))
    return [name for name, (shape, dtype) in SHAPES.items() if not is_right(loaded[name], shape, dtype)]


@pytest.fixture
def indexed(tmp_path: Path, job_of: JobOf) -> Path:
    job_of(4, 2).call(save_arrays, str(tmp_path / "c"), [2, 4], SAVED)
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert len(list((tmp_path / "c/state").glob("*.index"))) == 4
    assert {array["name"] for array in manifest["parts"][0]["arrays"] if array["chunks"]} == {"e", "g"}
    return tmp_path / "c"


@pytest.mark.parametrize("read_once", [True, False])
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(4, 2, [2, 4]), (2, 4, [2, 4]), (4, 1, [2, 2])])
def test_other_jobs_load_it(
    indexed: Path, job_of: JobOf, processes: int, devices: int, mesh: list[int], read_once: bool
) -> None:
    for specs in (LOADED, SAVED):
        found = job_of(processes, devices).call(load_arrays, str(indexed), mesh, specs, read_once)
        assert found == [[]] * processes


def restore_more(directory: str) -> str:
    """Restore a run; one process restores a tree more, which has only whole arrays."""
    state = {"a": global_array([64, 24], [4], ["x"]), "w": np.arange(5.0)}
    with jct.StepManager(directory, settings=INDEXED) as manager:
        manager.save(1, {"state": state, "extra": {"w": np.arange(3.0)}})
        manager.wait()
    targets: dict[str, Any] = {"state": state}
    if jax.process_index() == 0:
        targets["extra"] = {"w": np.zeros(3)}
    manager = jct.StepManager(directory, settings=jct.StoreSettings(barrier_timeout_s=30))
    found = manager.restore(targets)
    assert is_right(found["state"]["a"], [64, 24])
    return str(manager.restore()["state"]["w"].tolist())


def test_run_is_restored_with_and_without_targets(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(2, 2).call(restore_more, str(tmp_path)) == ["[0.0, 1.0, 2.0, 3.0, 4.0]"] * 2


def save_differently(path: str) -> None:
    """Save arrays of this process alone, whose shardings are described differently in the processes."""
    devices = jax.local_devices()[: 1 + jax.process_index()]
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "x"), jax.sharding.PartitionSpec())
    own = jax.device_put(np.arange(6.0, dtype=np.float32), place)
    tree = {"own": own, "plain": np.arange(4.0), "cut": global_array([64, 24], [4], ["x"])}
    jct.save(path, tree, settings=INDEXED)


def test_shardings_that_differ_do_without_index_files(tmp_path: Path, job_of: JobOf) -> None:
    job_of(2, 2).call(save_differently, str(tmp_path / "c"))
    assert json.loads((tmp_path / "c/manifest.json").read_text())["format_version"] == 1
    np.testing.assert_array_equal(np.asarray(jct.load(tmp_path / "c")["cut"]), values_of([64, 24]))


def test_one_process_reads_verifies_copies_and_removes_it(indexed: Path, tmp_path: Path) -> None:
    from tests.support.commands import printed  # a job that imports this module has devices of its own

    expected = {name: values_of(shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    loaded = jct.load(indexed)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), values)
    assert jct.verify(indexed).ok
    assert jct.metadata(indexed).bytes > sum(values.nbytes for values in expected.values())
    printed("show", str(indexed))
    printed("diff", str(indexed), str(indexed))
    printed("cp", str(indexed), str(tmp_path / "copy"))
    np.testing.assert_array_equal(np.asarray(jct.load(tmp_path / "copy")["a"]), expected["a"])
    segments = [load_file(file) for file in indexed.glob("state/*.safetensors")]
    assert sum(len(tensors) for tensors in segments) > len(SHAPES)
    (indexed / "state/p00077.json").write_text("mine")
    with pytest.raises(jct.CheckpointExistsError, match="p00077"):
        jct.save(indexed, {"w": np.arange(3)}, overwrite=True)
    (indexed / "state/p00077.json").unlink()
    jct.save(indexed, {"w": np.arange(3)}, overwrite=True)
    assert list(np.asarray(jct.load(indexed)["w"])) == [0, 1, 2]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["index.tables", "p00000.index", "p00002.index"])
@pytest.mark.parametrize("how", ["flip", "shorten", "remove", "swap"])
def test_damaged_index_is_refused(indexed: Path, name: str, how: str) -> None:
    file = indexed / "state" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "flip":
        file.write_bytes(data)
    elif how == "shorten":
        file.write_bytes(data[:-1])
    elif how == "remove":
        file.unlink()
    else:
        shutil.copy(indexed / "state/p00001.index", file)
    with pytest.raises(jct.CorruptCheckpointError):
        jct.load(indexed)
    assert not jct.verify(indexed).ok
