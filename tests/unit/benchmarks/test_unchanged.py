"""The benchmark of unchanged leaves: its goals, its page, and how it counts written bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import unchanged
from benchmarks.unchanged_sizes import written_below
from tests.unit.benchmarks.test_objects import MACHINE

MIB = 1 << 20


def saves(*each: tuple[float, float]) -> list[dict[str, float]]:
    return [{"seconds": seconds, "written": written * MIB} for seconds, written in each]


def results(last: float = 0.05) -> dict[str, Any]:
    subjects = {
        unchanged.OURS: [saves((1.0, 1034), (1.0, 1034), (0.05, 10), (0.05, 10), (last, 10))],
        unchanged.FROZEN: [saves((1.0, 1034), (0.05, 10), (0.05, 10), (0.05, 13), (0.05, 10))],
        unchanged.ORBAX: [saves(*[(3.0, 1000)] * 5)],
    }
    return {"command": "python", "mib": 1024, "flax": "0.12", "subjects": subjects}


def test_goals_are_about_later_saves() -> None:
    rows = {row[0]: row[1:] for row in unchanged.tables(results())[0].rows}
    assert rows["ours, from save 3 on: most MiB written"] == ("10.00", "at most 12", "met")
    assert rows["ours, frozen=, from save 2 on: most MiB written"] == ("13.00", "at most 12", "MISSED")
    assert rows["ours, from save 3 on: of the time of the first"] == ("0.05", "at most 0.1", "met")
    assert rows["Orbax: written, divided by ours"] == ("100.00", "at least 20", "met")
    assert rows["Orbax: seconds, divided by ours"] == ("60.00", "at least 10", "met")
    assert not any(name.startswith(unchanged.DCP) for name in rows)


def test_page_has_every_save(tmp_path: Path) -> None:
    unchanged.write(tmp_path, MACHINE, results())
    text = (tmp_path / unchanged.PAGE).read_text()
    assert text.count("ours, frozen=") >= 5


def test_second_name_of_a_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    before = written_below(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_bytes(b"123")
    now = written_below(tmp_path)
    assert sum(before.values()) == 5
    assert sum(size for each, size in now.items() if each not in before) == 3
