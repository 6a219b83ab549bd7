"""The commands that inspect and tend runs at URLs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection.runs import inspect_run
from jaxckpt_train.report.page import MARK
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.by_path import backend_for
from tests.support.commands import json_of, printed, refused
from tests.support.objects.stand_in import StandIn
from tests.support.runs import made_run, save_steps, step_of

all_dialects = pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)


def keys_of(server: StandIn, part: str) -> list[str]:
    """Return the keys that contain a text."""
    return sorted(key for key in server.objects.content if part in key)


def without_times(document: dict[str, Any]) -> Any:
    """Return a JSON document of `ls` without what differs between two runs of the same steps."""
    return [{**each, "name": "", "time": ""} for each in document["steps"]]


@all_dialects
def test_every_command_shows_the_same_as_on_a_disk(cloud: StandIn, tmp_path: Path) -> None:
    url, disk = cloud.url("runs/a"), tmp_path / "a"
    for directory in (url, disk):
        with jct.StepManager(directory) as manager:
            save_steps(manager, 1, 2, 3, metrics={"loss": 1.5})
            manager.pin(1)
    assert without_times(json_of("ls", url)) == without_times(json_of("ls", disk))
    for command in ("stats", "verify"):
        first, second = json_of(command, url), json_of(command, disk)
        assert {**first, "path": ""} == {**second, "path": ""}
    assert json_of("show", url, "--step", 2)["leaves"] == json_of("show", disk, "--step", 2)["leaves"]
    assert json_of("diff", url, disk)["differences"] == []
    assert len(json_of("diff", url, disk, "--step-a", 1, code=1)["differences"]) == 2
    assert printed("scrub", url).startswith("3 steps, 0 damaged")
    assert json_of("pin", url, 2)["was_pinned"] is False
    assert [step["pinned"] for step in json_of("ls", url)["steps"]] == [True, True, False]
    assert json_of("report", url)["counts"]["saves"] == 3


def test_single_checkpoint_is_known_by_its_url(cloud: StandIn) -> None:
    url = cloud.url("c")
    jct.save(url, {"w": 1.0})
    assert printed("show", url).startswith(f"{url}  (jaxckpt_train)")
    assert json_of("verify", url)["path"] == url
    assert f"use `jaxckpt show {url}`" in refused("ls", url, code=3)


def test_missing_urls_are_reported(cloud: StandIn) -> None:
    for command in ("ls", "show", "verify", "scrub", "report"):
        assert cloud.url("none") in refused(command, cloud.url("none"), code=3)
    assert cloud.objects.content == {}


def test_wrong_urls_are_reported() -> None:
    assert "s3://bucket/run" in refused("ls", "http://user:secret@host/run", code=2)
    assert "secret" not in refused("show", "s4://user:secret@host/run?token=secret", code=2)


def test_damage_at_url_is_found(cloud: StandIn) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2)
    (key,) = [key for key in keys_of(cloud, ".safetensors") if "step-0000000002" in key]
    data = bytearray(cloud.objects.content[key].data)
    data[-9] ^= 1
    cloud.objects.put(key, bytes(data))
    assert json_of("verify", url, code=1)["damaged"] is True
    assert [each["damaged"] for each in json_of("scrub", url, code=1)["steps"]] == [True, False]
    (manifest,) = [key for key in keys_of(cloud, "manifest.json") if "step-0000000002" in key]
    cloud.objects.put(manifest, b"{}")
    assert [each["valid"] for each in json_of("ls", url, code=1)["steps"]] == [True, False]
    assert json_of("show", url)["step"] == 1


def test_listing_a_run_takes_two_requests_a_step(cloud: StandIn) -> None:
    made_run(cloud.url("run"), *range(1, 11))
    cloud.requests.clear()
    inspect_run(backend_for(StoreSettings()), cloud.url("run"))
    assert len(cloud.requests) == 21
    assert {request.kind for request in cloud.requests} == {"get"}


@all_dialects
def test_deleted_steps_leave_their_data_for_readers(cloud: StandIn) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2, 3)
    assert json_of("prune", url, "--keep-latest", 2)["data_stays"] is False
    assert "by the next process that owns the run" in printed("prune", url, "--keep-latest", 1, "--yes")
    assert [step["step"] for step in json_of("ls", url)["steps"]] == [3]
    assert len(keys_of(cloud, "COMMIT")) == 1
    assert len(keys_of(cloud, ".safetensors")) == 3
    assert json_of("prune", url, "--keep-latest", 1, "--yes", "--wait", 0)["data_stays"] is False
    assert len(keys_of(cloud, ".safetensors")) == 1
    assert step_of(jct.StepManager(url).restore()) == 3


def test_data_is_removed_after_the_wait(cloud: StandIn) -> None:
    url = cloud.url("run")
    made_run(url, 1, 2)
    assert printed("prune", url, "--keep-latest", 1, "--yes", "--wait", 0.2).endswith("freed\n")
    assert len(keys_of(cloud, "step-")) == 3
    refused("prune", url, "--keep-latest", 1, "--wait", 5, code=2)
    refused("prune", url, "--keep-latest", 1, "--yes", "--wait", -1, code=2)


def test_live_owner_is_respected(cloud: StandIn) -> None:
    url = cloud.url("run")
    with jct.StepManager(url) as manager:
        save_steps(manager, 1, 2)
        assert "which is alive" in refused("prune", url, "--keep-latest", 1, "--yes", code=4)
        assert "which is alive" in refused("pin", url, 1, code=4)
        assert "is refused while it is alive" in printed("prune", url, "--keep-latest", 1)
        save_steps(manager, 3)
    assert [step["step"] for step in json_of("ls", url)["steps"]] == [1, 2, 3]


def test_page_is_written_to_file_and_to_url(cloud: StandIn, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    made_run(cloud.url("run"), 1, 2)
    printed("report", cloud.url("run"), "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith(MARK)
    for _ in range(2):  # the second replaces the first
        printed("report", cloud.url("run"), "-o", cloud.url("page.html"))
    assert cloud.objects.content["bucket/page.html"].data.startswith(MARK.encode())
    cloud.objects.put("bucket/mine.html", b"mine")
    assert "another file" in refused("report", cloud.url("run"), "-o", cloud.url("mine.html"), code=4)
    jct.save(cloud.url("c"), {"w": 1})
    refused("report", cloud.url("run"), "-o", cloud.url("c/page.html"), code=2)


def test_history_at_url_is_in_the_report(cloud: StandIn) -> None:
    made_run(cloud.url("run"), 1, 2)
    printed("prune", cloud.url("run"), "--keep-latest", 1, "--yes")
    found = json_of("report", cloud.url("run"))
    assert found["events"] == {"start": 2, "save": 2, "end": 2, "delete": 1}
    assert json.dumps(found).count("secret") == 0
