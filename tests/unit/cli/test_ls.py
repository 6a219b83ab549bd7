"""`jaxckpt ls`: every step of a run with its metadata, and why a step cannot be restored."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused
from tests.support.runs import (
    Clock,
    flip_a_payload_byte,
    made_run,
    remove_the_manifest,
    save_steps,
    segment_of,
    step_path,
    truncate_commit,
    truncate_the_manifest,
)

KEYS = {
    "step",
    "name",
    "bytes",
    "written_bytes",
    "time",
    "metrics",
    "pinned",
    "temporary",
    "current",
    "valid",
    "problem",
    "tier",
    "absent_files",
}


def rows(text: str) -> dict[int, str]:
    """The lines of the table by their steps, in one space each."""
    return {int(line.split()[0]): " ".join(line.split()) for line in text.splitlines()[1:]}


def test_step_is_listed_with_size_time_metrics_pin(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run", clock=Clock()) as manager:
        save_steps(manager, 1, metrics={"loss": 0.5})
        save_steps(manager, 2, metrics={"loss": float("nan"), "accuracy": 0.25})
        manager.pin(1)
        manager.attach_metrics(1, {"bleu": 30})
        times = [info.time for info in manager.infos]
    found = json_of("ls", tmp_path / "run")
    assert found["run"] == str(tmp_path / "run")
    first, second = found["steps"]
    assert set(first) == KEYS
    assert first["metrics"] == {"loss": 0.5, "bleu": 30}
    assert second["metrics"] == {"loss": "nan", "accuracy": 0.25}
    assert [datetime.datetime.fromisoformat(each["time"]) for each in (first, second)] == [
        time.replace(microsecond=time.microsecond // 1000 * 1000) for time in times
    ]
    assert (first["pinned"], second["pinned"]) == (True, False)
    assert all(each["valid"] and each["current"] and each["problem"] is None for each in (first, second))
    sizes = [
        sum(f.stat().st_size for f in segment_of(step_path(tmp_path / "run", step)).parent.iterdir()) for step in (1, 2)
    ]
    assert [each["bytes"] for each in (first, second)] == sizes
    text = printed("ls", tmp_path / "run")
    assert text.splitlines()[0].split() == ["step", "size", "age", "loss", "bleu", "accuracy", "state"]
    assert rows(text)[1].endswith("0.5 30 pinned, ok")
    assert rows(text)[2].endswith("nan 0.25 ok")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_the_manifest, "manifest.json: missing"),
        (truncate_the_manifest, "manifest.json: 100 bytes, but COMMIT says"),
        (truncate_commit, "COMMIT: not valid"),
    ],
)
def test_damaged_step_is_listed_with_its_problem(tmp_path: Path, damage, reason: str) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    damage(step_path(run, 2))
    found = json_of("ls", run, code=1)["steps"]
    assert [(each["step"], each["valid"]) for each in found] == [(1, True), (2, False), (3, True)]
    assert reason in found[1]["problem"]
    assert found[1]["bytes"] is None
    assert reason in printed("ls", run, code=1)


def test_uncommitted_step_is_listed_as_invalid(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    (step_path(run, 2) / "COMMIT").unlink()
    step_path(run, 3).symlink_to(step_path(run, 1))
    found = json_of("ls", run, code=1)["steps"]
    assert [each["valid"] for each in found] == [True, False, False]
    assert "has no COMMIT" in found[1]["problem"]
    assert (found[1]["time"], found[1]["current"]) == (None, False)
    assert "is not a directory" in found[2]["problem"]


def test_abandoned_steps_are_listed_apart(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    with jct.StepManager(run) as manager:
        manager.restore(step=1)
        save_steps(manager, 2)
    truncate_the_manifest(step_path(run, 3))  # of no use to anybody
    assert {each["step"]: each["current"] for each in json_of("ls", run)["steps"]} == {1: True, 2: True, 3: False}


def test_step_that_was_set_aside_is_marked(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    with jct.StepManager(run) as manager:
        manager.restore()
        save_steps(manager, 3)
    found = {each["step"]: each for each in json_of("ls", run)["steps"]}
    assert found[2]["problem"].startswith("set aside as damaged: ")
    assert "p00000-s000.safetensors" in found[2]["problem"]


def test_path_without_a_run_exits_with_3(tmp_path: Path) -> None:
    jct.save(tmp_path / "single", {"w": 1})
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert "expected a directory, found none" in refused("ls", tmp_path / "gone", code=3)
    assert "found a file: use `jaxckpt show" in refused("ls", tmp_path / "file", code=3)
    assert "found none" in refused("ls", tmp_path / "file" / "below", code=3)
    assert "found no steps" in refused("ls", tmp_path / "empty", code=3)
    assert "found one checkpoint of this package" in refused("ls", tmp_path / "single", code=3)
    assert "a URL such as" in refused("ls", "https://bucket/run", code=2)


def test_unreadable_directory_exits_with_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxckpt_train.errors import StorageError
    from jaxckpt_train.store.backends.local import LocalBackend

    def refuse(self: LocalBackend, path: str) -> None:
        raise StorageError(13, "cannot list the directory: Permission denied", path)

    monkeypatch.setattr(LocalBackend, "list", refuse)
    assert "Permission denied" in refused("ls", tmp_path, code=4)


def test_a_relative_path_and_a_home_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert json_of("ls", "run") == json_of("ls", "~/run") == json_of("ls", run)
    shutil.rmtree(run)


def test_step_with_damaged_manifest_has_no_age(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    truncate_the_manifest(step_path(directory, 2))
    _, second = json_of("ls", directory, code=1)["steps"]
    assert (second["step"], second["time"]) == (2, None)
    row = rows(printed("ls", directory, code=1))
    assert row[1].endswith(" s ok")
    assert " d " not in row[2]
