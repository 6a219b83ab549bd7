"""The files of an observed process: a kill loses no record, and values are kept up to a limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing import processes as record_files
from jaxckpt_train.testing.processes import Attempt, Leaf, Plan, RecordWriter, ScriptTarget, Stopped, Update


def attempt(folder: Path) -> Attempt:
    return Attempt(folder, Plan(ScriptTarget(()), str(folder)), 0)


def kept(folder: Path, leaf: Leaf) -> bytes | None:
    array = attempt(folder).array(leaf)
    return None if array is None else array.tobytes()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    with contextlib.closing(RecordWriter(tmp_path)) as writer:
        yield writer


def leaf(digest: str) -> Leaf:
    return Leaf("uint8", (4,), digest)


def test_records_are_read_back_while_process_still_writes(tmp_path: Path, writer: RecordWriter) -> None:
    update = Update(3, (), 0, {"loss": Leaf("float32", (), "d", b"\x00\x01\xff\n")}, {}, {"random": "a"})
    writer.add(update)
    writer.add(Stopped(3))
    assert attempt(tmp_path).lines == [update, Stopped(3)]


def test_truncated_line_is_left_out(tmp_path: Path, writer: RecordWriter) -> None:
    writer.add(Stopped(3))
    with open(tmp_path / "records.jsonl", "ab") as file:
        file.write(b'{"line":"upd')
    assert attempt(tmp_path).lines == [Stopped(3)]


def test_process_killed_at_start_has_no_record(tmp_path: Path) -> None:
    nothing = attempt(tmp_path / "none")
    assert nothing.lines == []
    assert nothing.log_tail().endswith("log.txt, ends with:\n  | (nothing)")


def test_values_are_kept_once_each_and_found_again(tmp_path: Path, writer: RecordWriter) -> None:
    first = writer.keep(leaf("a"), lambda: b"aaaa", 4)
    second = writer.keep(leaf("b"), lambda: b"bbbb", 4)
    again = writer.keep(leaf("a"), lambda: pytest.fail("the value is stored already"), 4)
    assert [kept(tmp_path, each) for each in (first, second, again)] == [b"aaaa", b"bbbb", b"aaaa"]
    assert (tmp_path / "values.bin").read_bytes() == b"aaaabbbb"
    assert kept(tmp_path, Leaf("uint8", (4,), "c", b"cccc")) == b"cccc"


def test_values_beyond_the_limit_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MOST_VALUE_BYTES", 10)
    with contextlib.closing(RecordWriter(tmp_path)) as writer:
        found = [writer.keep(leaf(digest), lambda: b"1234", 4) for digest in "abc"]
        assert [kept(tmp_path, each) for each in found] == [b"1234", b"1234", None]
        writer.reset_value_limit()
        assert kept(tmp_path, writer.keep(leaf("d"), lambda: b"5678", 4)) == b"5678"


def test_directory_with_content_is_refused(tmp_path: Path) -> None:
    assert record_files.new_directory(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "a" / "b" / "file").touch()
    with pytest.raises(jct.SettingsError, match="directory: expected a new or empty"):
        record_files.new_directory(tmp_path / "a" / "b")
