"""`jaxckpt pin`: it pins and unpins a step, and the next process of the run knows of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused, run
from tests.support.locks import is_owned
from tests.support.runs import made_run, step_path, truncate_the_manifest


def pinned(directory: Path) -> list[int]:
    return [info.step for info in jct.StepManager(directory).infos if info.pinned]


def test_a_pin_is_written_and_taken_back(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    found = json_of("pin", directory, 2)
    assert found == {"run": str(directory), "step": 2, "pinned": True, "was_pinned": False}
    assert pinned(directory) == [2]
    assert json_of("pin", directory, 2)["was_pinned"] is True
    assert printed("pin", directory, 2) == "step 2 is already pinned\n"
    assert printed("pin", directory, 2, "--off") == "step 2 is now unpinned\n"
    assert pinned(directory) == []
    assert printed("pin", directory, 2, "--off") == "step 2 is already unpinned\n"
    assert not is_owned(directory)


def test_missing_step_exits_with_3(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    assert "no committed step 7" in refused("pin", directory, 7, code=3)
    refused("pin", tmp_path / "gone", 1, code=3)
    assert not (tmp_path / "gone").exists()
    truncate_the_manifest(step_path(directory, 2))
    assert json_of("pin", directory, 2)["pinned"] is True  # it may be brought back from a copy


@pytest.mark.parametrize("step", ["x", "1.5", ""])
def test_invalid_step_exits_with_2(tmp_path: Path, step: str) -> None:
    assert run("pin", tmp_path, step).exit_code == 2


def test_negative_step_exits_with_2(tmp_path: Path) -> None:
    done = run("pin", tmp_path, "--", -1)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "step: expected a whole number from 0 to" in done.stderr


def test_command_is_no_process_of_the_training(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    before = jct.StepManager(directory).goodput()
    json_of("pin", directory, 2)
    json_of("prune", directory, "--keep-latest", 1, "--yes")
    json_of("pin", directory, 2, "--off")
    json_of("mv", directory / "step-0000000002", tmp_path / "away")
    shutil.move(directory, tmp_path / "moved")
    assert jct.StepManager(tmp_path / "moved").goodput() == before
    events = [*jct.StepManager(tmp_path / "moved").history.events()]
    assert [event.get("tends") for event in events if event["event"] == "start"] == [None, True, True, True, True]
    found = json_of("report", tmp_path / "moved", "-o", tmp_path / "page.html")
    assert len(found["processes"]) == 1
