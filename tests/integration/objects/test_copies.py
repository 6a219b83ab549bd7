"""`jaxckpt cp` and `mv` between disks and object stores: the same bytes, and a record that names each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.entry import parse_step_name
from tests.support.commands import json_of, printed, refused, run
from tests.support.objects.faults import Action, Fail, Request
from tests.support.objects.stand_in import StandIn
from tests.support.runs import Counter, files_below, made_run, save_steps, step_of, step_path

all_dialects = pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)
STATE = {"w": jnp.arange(5000, dtype=jnp.float32), "b": np.arange(7, dtype=np.int8), "lr": 0.1}


class FailReadsOf:
    """Answer each read of matching objects with 404."""

    def __init__(self, part: str) -> None:
        self._part = part

    def decide(self, request: Request) -> Action | None:
        return Fail(404) if request.kind in ("get", "head") and self._part in request.key else None


def objects_below(server: StandIn, key: str) -> dict[str, bytes]:
    """Return the objects below a key with their bytes, by the rest of their keys."""
    prefix = f"bucket/{key}/"
    content = server.objects.content
    return {name.removeprefix(prefix): content[name].data for name in sorted(content) if name.startswith(prefix)}


def names_of(server: StandIn, run: str) -> list[str]:
    """Return the names of the steps that have COMMIT in a run."""
    return sorted(name.removesuffix("/COMMIT") for name in objects_below(server, run) if name.endswith("/COMMIT"))


def data_of(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without the manifest, which says that a copy has been made, and COMMIT, which has its digest."""
    return {name: data for name, data in files.items() if name not in ("manifest.json", "COMMIT")}


def run_with_all_data(directory: Any) -> None:
    """Save a step with a tree, a JSON value and the position of an iterator."""
    with jct.StepManager(directory) as manager:
        save_steps(manager, 1)
        manager.save(2, {"state": STATE, "data": Counter(), "config": jct.JsonValue({"a": [1]})}, metrics={"loss": 2.0})
        manager.wait()
        manager.attach_metrics(2, {"accuracy": 0.5})


@all_dialects
def test_single_checkpoint_goes_there_and_back(cloud: StandIn, tmp_path: Path) -> None:
    saved = jct.save(tmp_path / "c", STATE, custom_metadata=[1])
    before = files_below(tmp_path / "c")
    found = json_of("cp", tmp_path / "c", cloud.url("a/c"), "--check")
    assert (found["source"], found["path"], found["bytes"]) == (str(tmp_path / "c"), cloud.url("a/c"), saved.bytes)
    (folder,) = {name.partition("/")[0] for name in objects_below(cloud, "a/c")} - {"COMMIT"}
    assert objects_below(cloud, f"a/c/{folder}") == before
    assert json_of("cp", cloud.url("a/c"), f"{tmp_path}/back/")["path"] == str(tmp_path / "back" / "c")
    assert files_below(tmp_path / "back" / "c") == before
    assert jct.metadata(cloud.url("a/c")).custom_metadata == [1]


@all_dialects
def test_step_goes_to_run_at_url_and_back(cloud: StandIn, tmp_path: Path) -> None:
    run_with_all_data(tmp_path / "run")
    url = cloud.url("runs/a")
    found = json_of("cp", tmp_path / "run", f"{url}/", "--check")
    (name,) = names_of(cloud, "runs/a")
    assert found["path"] == f"{url}/{name}"
    assert parse_step_name(name) == (2, 0)
    assert data_of(objects_below(cloud, f"runs/a/{name}")) == data_of(files_below(step_path(tmp_path / "run", 2)))
    (step,) = json_of("ls", url)["steps"]
    assert step["metrics"] == {"loss": 2.0, "accuracy": 0.5}
    assert json_of("cp", url, f"{tmp_path}/back/")["path"] == str(step_path(tmp_path / "back", 2))
    assert data_of(files_below(step_path(tmp_path / "back", 2))) == data_of(files_below(step_path(tmp_path / "run", 2)))
    assert jct.metadata(step_path(tmp_path / "back", 2)).metrics == {"loss": 2.0, "accuracy": 0.5}
    assert json_of("diff", tmp_path / "run", url)["differences"] == []


def test_metrics_of_record_are_copied_from_url(cloud: StandIn, tmp_path: Path) -> None:
    run_with_all_data(cloud.url("run"))
    printed("cp", cloud.url("run"), tmp_path / "one")
    assert jct.metadata(tmp_path / "one").metrics == {"loss": 2.0, "accuracy": 0.5}
    printed("cp", cloud.url("run"), cloud.url("other/"))
    assert json_of("ls", cloud.url("other"))["steps"][0]["metrics"] == {"loss": 2.0, "accuracy": 0.5}


def test_training_continues_from_copied_steps(cloud: StandIn, tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1, 2, 3)
    for step in (1, 2, 3):
        printed("cp", tmp_path / "run", cloud.url("run/"), "--step", step)
    with jct.StepManager(cloud.url("run")) as manager:
        assert step_of(manager.restore()) == 3
        save_steps(manager, 4)
        assert manager.steps == [1, 2, 3, 4]
    printed("cp", cloud.url("run"), f"{tmp_path}/run")
    assert step_of(jct.StepManager(tmp_path / "run").restore()) == 4


def test_step_at_url_is_replaced_only_with_overwrite(cloud: StandIn, tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1, 2)
    printed("cp", tmp_path / "run", cloud.url("run/"))
    before = names_of(cloud, "run")
    assert "pass --overwrite" in refused("cp", tmp_path / "run", cloud.url("run"), code=4)
    assert names_of(cloud, "run") == before
    printed("cp", tmp_path / "run", cloud.url("run"), "--overwrite")
    after = names_of(cloud, "run")
    assert len(after) == 1
    assert after != before
    assert [each["name"] for each in json_of("ls", cloud.url("run"))["steps"]] == after
    assert step_of(jct.StepManager(cloud.url("run")).restore()) == 2


def test_live_owner_of_destination_is_respected(cloud: StandIn, tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1, 2)
    with jct.StepManager(cloud.url("run")) as manager:
        save_steps(manager, 1)
        before = objects_below(cloud, "run")
        assert "which is alive" in refused("cp", tmp_path / "run", cloud.url("run"), code=4)
        assert "which is alive" in refused("mv", tmp_path / "run", cloud.url("run"), "--step", 1, code=4)
        assert objects_below(cloud, "run") == before
        assert json_of("cp", cloud.url("run"), tmp_path / "out")["bytes"] > 0  # a copy out of it needs no owner
    assert jct.StepManager(tmp_path / "run").steps == [1, 2]


def test_damaged_source_leaves_no_copy(cloud: StandIn, tmp_path: Path) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2)
    jct.save(cloud.url("c"), STATE)
    for key in [key for key in cloud.objects.content if key.endswith(".safetensors")]:
        data = bytearray(cloud.objects.content[key].data)
        data[-9] ^= 1
        cloud.objects.put(key, bytes(data))
    before = set(cloud.objects.content)
    for target in (tmp_path / "out", cloud.url("out")):
        assert "p00000-s000.safetensors" in refused("cp", url, target, code=1)
        assert "p00000-s000.safetensors" in refused("mv", url, target, "--step", 1, code=1)
        assert "p00000-s000.safetensors" in refused("mv", cloud.url("c"), target, code=1)
    assert not (tmp_path / "out").exists()
    assert {key for key in cloud.objects.content if "/out" in key} == set()
    assert before <= set(cloud.objects.content)
    refused("cp", url, cloud.url("new/"), code=1)
    assert names_of(cloud, "new") == []


def test_existing_targets_at_url_are_kept(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", STATE)
    jct.save(cloud.url("c"), {"w": 1})
    before = objects_below(cloud, "c")
    assert "pass --overwrite" in refused("cp", tmp_path / "c", cloud.url("c"), code=4)
    assert "inside s3://bucket/c" in refused("cp", tmp_path / "c", cloud.url("c/inner"), code=2)
    assert "omit the / at the end" in refused("cp", tmp_path / "c", cloud.url("c/"), code=2)
    assert "found the same" in refused("cp", cloud.url("c"), cloud.url("c"), "--overwrite", code=2)
    assert "found one inside" in refused("cp", cloud.url("c"), cloud.url("c/inner"), code=2)
    cloud.objects.put("bucket/others/file", b"1")
    assert "not a checkpoint" in refused("cp", tmp_path / "c", cloud.url("others"), "--overwrite", code=4)
    assert objects_below(cloud, "c") == before
    printed("cp", tmp_path / "c", cloud.url("c"), "--overwrite")
    assert jct.load(cloud.url("c"))["lr"] == 0.1


@all_dialects
def test_single_checkpoint_is_moved_both_ways(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", STATE)
    before = files_below(tmp_path / "c")
    assert json_of("mv", tmp_path / "c", cloud.url("c"))["removed"] is True
    assert not (tmp_path / "c").exists()
    assert json_of("mv", cloud.url("c"), cloud.url("d"))["path"] == cloud.url("d")
    assert objects_below(cloud, "c") == {}
    assert json_of("mv", cloud.url("d"), tmp_path / "d")["source"] == cloud.url("d")
    assert dict(cloud.objects.content) == {}
    assert files_below(tmp_path / "d") == before


@all_dialects
def test_step_is_moved_out_of_run_at_url(cloud: StandIn, tmp_path: Path) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2, 3)
    first, second, third = names_of(cloud, "run")
    data = data_of(objects_below(cloud, f"run/{first}"))
    assert "minutes later" in printed("mv", url, f"{tmp_path}/old/", "--step", 1)
    assert data_of(files_below(step_path(tmp_path / "old", 1))) == data
    assert json_of("mv", url, cloud.url("other/"), "--step", 2)["removed"] is True
    assert jct.StepManager(url).steps == [3]
    assert names_of(cloud, "run") == [third]
    assert data_of(objects_below(cloud, f"run/{second}")).keys() == data.keys()  # for readers
    events = [(event["event"], event.get("name")) for event in jct.StepManager(url).history.events()]
    assert [name for event, name in events if event == "delete"] == [first, second]
    assert step_of(jct.StepManager(cloud.url("other")).restore()) == 2


def test_record_drops_step_before_its_data(cloud: StandIn, tmp_path: Path) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2)
    cloud.requests.clear()
    printed("mv", url, tmp_path / "one", "--step", 1)
    changes = [(each.kind, each.key) for each in cloud.requests if each.kind not in ("get", "head", "list")]
    deletes = [number for number, (kind, _) in enumerate(changes) if kind.startswith("delete")]
    records = [number for number, (_, key) in enumerate(changes) if key.endswith("run/record.json")]
    assert len(records) == 2  # the take-over, and the deletion
    assert records[1] < deletes[0]


def test_steps_that_run_at_url_needs_are_kept(cloud: StandIn, tmp_path: Path) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2)
    printed("pin", url, 1)
    assert "a pinned step;" in refused("mv", url, tmp_path / "new", "--step", 1, code=2)
    assert "the newest step;" in refused("mv", url, tmp_path / "new", "--step", 2, code=2)
    assert "outside of the run" in refused("mv", url, f"{url}/step-0000000007", "--step", 1, code=2)
    assert jct.StepManager(url).steps == [1, 2]


def test_failed_check_of_copy_keeps_source(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", STATE)
    before = files_below(tmp_path)
    cloud.faults = FailReadsOf(".safetensors")
    done = run("mv", tmp_path / "c", cloud.url("c"))
    assert done.exit_code == 1
    assert "p00000-s000.safetensors" in done.stderr
    cloud.faults = None
    assert files_below(tmp_path) == before
    assert dict(cloud.objects.content) == {}


def test_other_objects_next_to_source_are_kept(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(cloud.url("c"), STATE)
    cloud.objects.put("bucket/c/notes.txt", b"mine")
    before = dict(cloud.objects.content)
    assert "found also notes.txt" in refused("mv", cloud.url("c"), tmp_path / "c", code=2)
    assert dict(cloud.objects.content) == before


def test_checkpoint_uploaded_by_other_tool_is_moved(cloud: StandIn, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", STATE)
    before = files_below(tmp_path / "c")
    for name, data in before.items():
        cloud.objects.put(f"bucket/up/{name}", data)
    assert "outside of any checkpoint" in refused("cp", tmp_path / "c", cloud.url("up/inner"), code=2)
    printed("mv", cloud.url("up"), tmp_path / "down")
    assert files_below(tmp_path / "down") == before
    assert dict(cloud.objects.content) == {}
