"""A run is read from its directory; unreadable parts become warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import NotACheckpointError
from jaxckpt_train.report.gather import read_run
from tests.support.history_events import at
from tests.support.report_runs import BACKEND, gathered_of, write_history
from tests.support.runs import made_run, save_steps


@pytest.mark.parametrize("name", ["nothing", "empty", "file", "other"])
def test_path_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_text("x")
    with pytest.raises(NotACheckpointError, match=f"{tmp_path / name}: expected"):
        read_run(BACKEND, str(tmp_path / name))


def test_damaged_lines_are_counted_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_history(tmp_path, at(0, "start"), {"event": "nothing"})
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n{half\n")
    read = read_run(BACKEND, str(tmp_path))
    assert read.history.events == {"start": 1}
    assert len(read.warnings) == 3
    assert "line 3 is left out" in read.warnings[0]
    assert read.warnings[-1].startswith("1 lines of history.jsonl")
    assert capfd.readouterr().err == ""


def test_unreadable_history_does_not_hide_steps(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    (tmp_path / "history.jsonl").unlink()
    (tmp_path / "history.jsonl").mkdir()
    gathered = gathered_of(tmp_path)
    assert gathered.warnings[0].startswith("the history cannot be read: ")
    assert ([step.step for step in gathered.steps], gathered.saves) == ([1, 2], ())


def test_live_owner_is_reported(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        read = read_run(BACKEND, str(tmp_path))
        assert read.is_live
        assert [row.how for row in gathered_of(tmp_path).processes] == ["running"]
    assert not read_run(BACKEND, str(tmp_path)).is_live
    assert [row.how for row in gathered_of(tmp_path).processes] == ["closed"]


def test_gathering_changes_no_file(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    gathered_of(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
