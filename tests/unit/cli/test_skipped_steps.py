"""A damaged newest step is skipped, and every command reports that."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.cli import maintain
from tests.support.commands import json_of, refused, run
from tests.support.runs import (
    DAMAGE,
    becomes_newer,
    empty_commit,
    flip_a_payload_byte,
    made_run,
    remove_the_manifest,
    save_steps,
    step_path,
    truncate_commit,
    truncate_the_manifest,
)


def flip_a_byte_of_the_manifest(step: Path) -> None:
    data = bytearray((step / "manifest.json").read_bytes())
    data[100] ^= 1
    (step / "manifest.json").write_bytes(data)


def remove_commit(step: Path) -> None:
    (step / "COMMIT").unlink()


def replace_commit_by_garbage(step: Path) -> None:
    (step / "COMMIT").write_bytes(b"\x00\xff[[[[")


BAD = (remove_the_manifest, truncate_the_manifest, flip_a_byte_of_the_manifest, remove_commit)
BAD += (replace_commit_by_garbage, truncate_commit, empty_commit)
CALLS: dict[str, list[str]] = {
    "verify": ["verify", "run"],
    "cp": ["cp", "run", "copy"],
    "mv": ["mv", "run", "moved"],
    "show": ["show", "run"],
    "stats": ["stats", "run"],
    "diff": ["diff", "run", "same"],
    "export": ["export", "run", "exported", "--to", "orbax", "--dry-run"],
    "import": ["import", "run", "imported", "--dry-run"],
}


def call(folder: Path, name: str) -> list[str]:
    paths = {"run", "same", "copy", "moved", "exported", "imported"}
    return [str(folder / each) if each in paths else each for each in CALLS[name]]


@pytest.mark.parametrize("damage", BAD)
def test_skipped_step_is_reported_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    step = step_path(directory, 3)
    damage(step)
    found = json_of("verify", directory, code=1)
    assert found["path"] == str(step_path(directory, 2))
    assert found["ok"]
    assert found["skipped"] == [step.name]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{step} is skipped: ")
    file = "COMMIT" if "commit" in damage.__name__ else "manifest.json"
    assert file in record.getMessage().partition(" is skipped: ")[2]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_command_reports_skipped_steps(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    shutil.copytree(step_path(directory, 2), tmp_path / "same")
    remove_the_manifest(step_path(directory, 3))
    remove_commit(step_path(directory, 2))
    done = run(*call(tmp_path, name), "--json")
    assert name != "verify" or done.exit_code == 1
    if name != "mv":  # it refuses to move the newest valid step
        names = [step_path(directory, step).name for step in (3, 2)]
        assert json.loads(done.stdout)["skipped_a" if name == "diff" else "skipped"] == names
    assert [record.getMessage().partition(" is skipped")[0] for record in caplog.records][:2] == [
        str(step_path(directory, step)) for step in (3, 2)
    ]


def test_mv_of_given_step_reports_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    remove_the_manifest(step_path(directory, 3))
    assert json_of("mv", directory, tmp_path / "moved", "--step", 1)["skipped"] == []
    assert json_of("verify", directory, "--step", 2)["skipped"] == []
    assert "skipped" not in caplog.text


def test_link_and_empty_step_directory_are_reported(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    step_path(directory, 4).symlink_to(step_path(directory, 1))
    step_path(directory, 3).mkdir()
    assert json_of("verify", directory, code=1)["skipped"] == [step_path(directory, step).name for step in (4, 3)]


def test_older_and_abandoned_steps_are_not_reported(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3, 4)
    with jct.StepManager(directory) as manager:
        manager.restore(step=2)
        save_steps(manager, 3)
    (old,) = (path for path in directory.glob("step-0000000004*"))
    remove_the_manifest(old)
    remove_the_manifest(step_path(directory, 1))
    found = json_of("verify", directory)
    assert (found["path"].rpartition("/")[2].partition("-")[2][:10], found["skipped"]) == ("0000000003", [])


def test_earlier_quarantined_step_is_not_reported(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    flip_a_payload_byte(step_path(directory, 2))
    with jct.StepManager(directory) as manager:
        manager.restore()
        save_steps(manager, 3)
    found = json_of("verify", directory)
    assert (found["path"], found["skipped"]) == (str(step_path(directory, 3)), [])


@pytest.mark.parametrize("name", ["a missing manifest", "a truncated COMMIT"])
def test_run_of_damaged_steps_exits_with_1(tmp_path: Path, name: str) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    for step in (1, 2):
        DAMAGE[name][0](step_path(directory, step))
    message = refused("verify", directory, code=1)
    assert "none of its steps" in message
    assert f"{step_path(directory, 2).name}: " in message
    refused("cp", directory, tmp_path / "copy", code=1)
    remove_commit(step_path(directory, 1))
    remove_commit(step_path(directory, 2))
    refused("show", directory, code=1)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_step_of_newer_version_is_not_skipped(tmp_path: Path, name: str) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    shutil.copytree(step_path(directory, 1), tmp_path / "same")
    becomes_newer(step_path(directory, 2))
    if name != "mv":  # of a run without one that may go
        assert "--step 1" in refused(*call(tmp_path, name), code=1)
    becomes_newer(step_path(directory, 1))
    assert "FormatVersionError" in run(*call(tmp_path, name), "--json").stdout
    assert {path.name for path in tmp_path.iterdir()} == {"run", "same"}


def test_step_deleted_meanwhile_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made_run(tmp_path / "run", 1)
    open_at = maintain.open_at

    def opened_and_gone(*arguments: object) -> object:
        opened = open_at(*arguments)  # type: ignore[arg-type]
        shutil.rmtree(step_path(directory, 1))
        return opened

    monkeypatch.setattr(maintain, "open_at", opened_and_gone)
    done = run("verify", directory)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "was removed" in done.stderr
