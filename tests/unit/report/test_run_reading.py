"""A run is read from its directory; unreadable parts become warnings."""

from __future__ import annotations

import datetime
import errno
import logging
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import NotACheckpointError, StorageError
from jaxckpt_train.report.gather import MOST_WARNINGS, read_run
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.history_events import at
from tests.support.report_runs import BACKEND, NOW, gathered_of, write_history
from tests.support.runs import START, made_run, save_steps


@pytest.mark.parametrize("name", ["nothing", "empty", "file", "other"])
def test_path_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_text("x")
    with pytest.raises(NotACheckpointError, match=f"{tmp_path / name}: expected"):
        read_run(BACKEND, str(tmp_path / name), NOW)


def test_damaged_lines_are_counted_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_history(tmp_path, at(0, "start"), {"event": "nothing"})
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n{half\n")
    read = read_run(BACKEND, str(tmp_path), NOW)
    assert read.history.events == {"start": 1}
    assert len(read.warnings) == 3
    assert "line 3 is left out" in read.warnings[0]
    assert read.warnings[-1].startswith("1 lines of history.jsonl")
    assert capfd.readouterr().err == ""


class WarningBackend(LocalBackend):
    """Logs many warnings."""

    def list(self, path: str) -> Any:
        for number in range(500):
            logging.getLogger("jaxckpt_train").warning("%s: warning %d", path, number)
        return super().list(path)


def test_only_the_first_warnings_are_kept(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes(b"x\n" * 500)
    read = read_run(BACKEND, str(tmp_path), NOW)
    assert "495 more lines" in read.warnings[-1]
    read = read_run(WarningBackend(), str(tmp_path), NOW)
    assert len(read.warnings) == MOST_WARNINGS + 1
    assert read.warnings[-1].startswith("more warnings")


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
        read = read_run(BACKEND, str(tmp_path), NOW)
        assert read.is_live
        assert [row.how for row in gathered_of(tmp_path).processes] == ["running"]
    assert not read_run(BACKEND, str(tmp_path), NOW).is_live
    assert [row.how for row in gathered_of(tmp_path).processes] == ["closed"]


class Unwritable(LocalBackend):
    """A directory whose lock this user may not read."""

    def modified_ns(self, path: str) -> int:
        raise StorageError(errno.EACCES, "not for this user", path)


@pytest.mark.parametrize(("events", "seconds", "is_live"), [
    ([at(0, "start"), at(50, "progress", step=3)], 100, True),
    ([at(0, "start"), at(50, "progress", step=3)], 300, False),
    ([at(0, "start"), at(50, "end", how="closed")], 100, False),
])  # fmt: skip
def test_recent_event_means_live_owner(
    tmp_path: Path, events: list[dict[str, Any]], seconds: float, is_live: bool
) -> None:
    write_history(tmp_path, *events)
    (tmp_path / ".owner").write_text("not to be read")
    now = START + datetime.timedelta(seconds=seconds)
    assert read_run(Unwritable(), str(tmp_path), now).is_live == is_live
    (tmp_path / ".owner").unlink()
    assert not read_run(Unwritable(), str(tmp_path), now).is_live


def test_gathering_changes_no_file(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    gathered_of(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
