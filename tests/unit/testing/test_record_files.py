"""The files of an observed process: a kill loses no record."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing import processes as record_files
from jaxckpt_train.testing.processes import Attempt, Leaf, Plan, ScriptTarget, Stopped, Update, add_record


def attempt(folder: Path) -> Attempt:
    return Attempt(folder, Plan(ScriptTarget(()), str(folder)), 0)


def test_records_are_read_back_while_process_still_writes(tmp_path: Path) -> None:
    update = Update(3, (), 0, {"loss": Leaf("float32", (), "d", b"\x00\x01\xff\n")}, {}, {"random": "a"})
    add_record(tmp_path, update)
    add_record(tmp_path, Stopped(3))
    assert attempt(tmp_path).lines == [update, Stopped(3)]


def test_truncated_line_is_left_out(tmp_path: Path) -> None:
    add_record(tmp_path, Stopped(3))
    with open(tmp_path / "records.jsonl", "ab") as file:
        file.write(b'{"line":"upd')
    assert attempt(tmp_path).lines == [Stopped(3)]


def test_process_killed_at_start_has_no_record(tmp_path: Path) -> None:
    nothing = attempt(tmp_path / "none")
    assert nothing.lines == []
    assert nothing.log_tail().endswith("log.txt, ends with:\n  | (nothing)")


def test_directory_with_content_is_refused(tmp_path: Path) -> None:
    assert record_files.new_directory(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "a" / "b" / "file").touch()
    with pytest.raises(jct.SettingsError, match="directory: expected a new or empty"):
        record_files.new_directory(tmp_path / "a" / "b")
