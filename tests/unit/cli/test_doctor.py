"""`jaxckpt doctor`: it reports the state of a run and of its disk, and leaves no files."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.cli import doctor
from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.local import FileSystem, LocalBackend
from tests.support.commands import json_of, printed, refused, run
from tests.support.runs import (
    Clock,
    files_below,
    made_run,
    remove_the_segment,
    step_path,
    truncate_the_manifest,
)

SMALL = ("--size-mib", 1)
KEYS = {"path", "is_there", "versions", "file_system", "operations", "disk", "owner", "run", "at_risk", "warnings"}


def test_plain_directory_shows_versions_space_and_speed(tmp_path: Path) -> None:
    found = json_of("doctor", tmp_path, *SMALL)
    assert set(found) == KEYS
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["jax"] == importlib.metadata.version("jax")
    assert found["versions"]["jaxckpt-train"] == importlib.metadata.version("jaxckpt-train")
    there = os.statvfs(tmp_path)
    assert found["file_system"]["total_bytes"] == there.f_blocks * there.f_frsize
    assert set(found["file_system"]) == {"kind", "mount", "total_bytes", "free_bytes", "free_files"}
    assert found["disk"]["bytes"] == 1 << 20
    assert set(found["disk"]) == {
        "bytes", "direct_write", "direct_read", "write_bytes_per_s", "sync_s", "read_bytes_per_s", "small_file_s",
    }  # fmt: skip
    assert min(found["disk"][name] for name in ("write_bytes_per_s", "read_bytes_per_s", "small_file_s")) > 0
    assert (found["owner"], found["run"], found["at_risk"], found["warnings"]) == (None, None, None, [])
    assert list(tmp_path.iterdir()) == []


def test_directory_missing_yet_is_not_made(tmp_path: Path) -> None:
    found = json_of("doctor", tmp_path / "new", *SMALL)
    assert not found["is_there"]
    assert json_of("doctor", tmp_path, *SMALL)["is_there"]
    assert f"{tmp_path / 'new'}: does not exist yet" in printed("doctor", tmp_path / "new", *SMALL)
    assert "does not exist" not in printed("doctor", tmp_path, *SMALL)
    assert (found["path"], found["disk"]["bytes"]) == (str(tmp_path / "new"), 1 << 20)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "found neither" in refused("doctor", tmp_path / "new" / "deep", code=3)
    refused("doctor", tmp_path / "file", code=3)
    refused("doctor", tmp_path / "file" / "below", code=3)


def test_disk_trial_may_be_skipped(tmp_path: Path) -> None:
    assert json_of("doctor", tmp_path, "--size-mib", 0)["disk"] is None
    assert run("doctor", tmp_path, "--size-mib", -1).exit_code == 2


def test_run_shows_its_newest_step_unchanged(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, clock=Clock())
    before = files_below(directory)
    found = json_of("doctor", directory, *SMALL)
    assert set(found["run"]) == {
        "steps", "newest_step", "newest_age_s", "newest_bytes", "damaged", "uncommitted", "unreadable", "stale_files",
    }  # fmt: skip
    assert (found["run"]["steps"], found["run"]["newest_step"]) == (2, 2)
    assert found["run"]["newest_bytes"] == jct.metadata(step_path(directory, 2)).bytes
    (info,) = [info for info in jct.StepManager(directory).infos if info.step == 2]
    age_s = (datetime.datetime.now(datetime.UTC) - info.time).total_seconds()
    assert age_s - 60 < found["run"]["newest_age_s"] <= age_s
    assert found["owner"] is None
    assert files_below(directory) == before
    text = printed("doctor", directory, *SMALL)
    assert "owner: none" in text
    assert "newest valid step: 2, " in text


def test_pins_do_not_hide_last_training(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    printed("pin", directory, 1)
    risk = json_of("doctor", directory, *SMALL)["at_risk"]
    assert (risk["how"], risk["completed"], risk["updates"]) == ("closed", 2, 0)
    assert "(closed); lost: nothing" in printed("doctor", directory, *SMALL)


def test_damaged_newest_steps_cause_warnings(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 4, 6)
    remove_the_segment(step_path(directory, 6))
    truncate_the_manifest(step_path(directory, 4))
    (step_path(directory, 9)).mkdir()
    found = json_of("doctor", directory, *SMALL, code=1)
    assert set(found["run"]["damaged"]) == {step_path(directory, 4).name, step_path(directory, 6).name}
    assert "p00000-s000.safetensors" in found["run"]["damaged"][step_path(directory, 6).name]
    assert list(found["run"]["uncommitted"]) == [step_path(directory, 9).name]
    assert (found["run"]["steps"], found["run"]["newest_step"]) == (3, 1)
    assert (found["at_risk"]["since"], found["at_risk"]["updates"]) == (1, 5)
    assert [warning.partition(":")[0] for warning in found["warnings"]] == [
        step_path(directory, step).name for step in (4, 6, 9)
    ]
    text = printed("doctor", directory, *SMALL, code=1)
    assert text.count("warning: ") == 3


def test_run_without_valid_step_is_a_warning(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    remove_the_segment(step_path(directory, 1))
    found = json_of("doctor", directory, *SMALL, code=1)
    assert found["run"]["newest_step"] is None
    assert any("can be restored" in warning for warning in found["warnings"])


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LocalBackend, path: str, *, direct: object) -> None:
        raise StorageError(28, "cannot create the file: No space left on device", path)

    monkeypatch.setattr(LocalBackend, "create", full)
    found = json_of("doctor", tmp_path, *SMALL, code=1)
    assert found["disk"] is None
    (warning,) = found["warnings"]
    assert warning.startswith("the disk failed its test: ")
    assert "No space left" in warning


@pytest.mark.parametrize(
    ("files", "warning"),
    [
        (FileSystem("ext4", "/", 1 << 40, 20_000, 1 << 20), "is free"),
        (FileSystem("ext4", "/", 1 << 40, 1 << 39, 3), "only 3 more files"),
        (FileSystem("tmpfs", "/dev/shm", 1 << 40, 1 << 39, None), "is in memory"),
        (FileSystem("ext4", "/", 1 << 40, 1 << 39, 1 << 20), None),
    ],
)
def test_nearly_full_file_system_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: FileSystem, warning: str | None
) -> None:
    monkeypatch.setattr(doctor, "file_system_of", lambda path: files)
    directory = made_run(tmp_path / "run", 1)
    found = json_of("doctor", directory, *SMALL, code=1 if warning else 0)
    assert [warning in each for each in found["warnings"]] == ([True] if warning else [])


def test_history_that_cannot_be_read_is_warning(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    (directory / "history.jsonl").unlink()
    (directory / "history.jsonl").mkdir()
    found = json_of("doctor", directory, *SMALL, code=1)
    assert found["at_risk"] is None
    assert "the history cannot be read" in found["warnings"][0]


def test_end_of_training_is_shown_in_one_line(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    history = directory / "history.jsonl"
    history.write_text(history.read_text().replace('"closed"', '"clo\\u001b[31m\\nsed"'))
    text = printed("doctor", directory, *SMALL)
    assert r"(clo\x1b[31m\nsed)" in text
    assert all(line.isprintable() for line in text.splitlines())
