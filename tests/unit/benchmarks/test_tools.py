"""The benchmark of the tools: its tables."""

from __future__ import annotations

from typing import Any

from benchmarks import tools_report

SIZE = {"arrays": 4, "array_bytes": 512 << 20, "pair_arrays": 2, "steps": 7, "leaves": 9}


def samples(*seconds: float) -> list[dict[str, Any]]:
    return [{"seconds": each, "peak_bytes": 3 << 20} for each in seconds]


def test_ratios_are_of_the_same_round() -> None:
    results = {
        "size": SIZE,
        "imports": {"v0": {"load by Orbax": samples(1, 2, 4), "import": samples(2, 2, 2)}},
        "diff": {"read both, raw": samples(1)},
        "commands": {"ls, 7 steps": [0.25, 0.5, 0.125]},
    }
    imports, diff, commands = tools_report.tables(results)
    assert imports.title == "2 GiB saved by Orbax v0"
    assert imports.rows[1] == ("import", "2.00\n2.00 .. 2.00", "1.00\n0.50 .. 2.00", "3")
    assert diff.title == "two steps of 1 GiB, in which every value differs"
    assert commands.rows == [("ls, 7 steps", "250\n125 .. 500")]
