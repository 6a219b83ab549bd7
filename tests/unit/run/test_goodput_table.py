"""The goodput table: complete numbers on a terminal of any width, for any number of attempts and any text."""

from __future__ import annotations

import datetime
import io
from typing import Any

import pytest

from jaxckpt_train.run.goodput import COLUMNS, MOST_ROWS, Attempt, Goodput, Stretch, _duration, goodput, print_goodput
from tests.support.runs import START


def process(number: int, **more: Any) -> Attempt:
    """Attempt `number` of a run, with 1,000 updates in an hour; the next attempt starts after the first 500."""
    began = START + datetime.timedelta(hours=2 * number)
    stretch = Stretch(500 * number, 500 * number + 1000, [500 * number + 500])
    some = {"how": "killed", "stretches": [stretch], "saves": 1, "blocked_s": 1.25, "to_resume_s": 100.0}
    return Attempt(began, began + datetime.timedelta(hours=1), **{**some, **more})


def printed(found: Goodput, width: int | None = None) -> list[str]:
    file = io.StringIO()
    print_goodput(found, file, width)
    return file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def rows(lines: list[str]) -> list[dict[str, str]]:
    """The cells of each row by the name of their column."""
    (names,) = [cells(line) for line in lines if "┃" in line]
    return [dict(zip(names, cells(line), strict=True)) for line in lines if "│" in line]


def test_attempts_and_total_have_a_row_each() -> None:
    lines = printed(goodput([process(0), process(1)]))
    assert lines[0].strip() == "2 processes, useful time 48.6%; between processes 1h00m"
    first, second, total = rows(lines)
    assert list(first) == list(COLUMNS)
    began = f"{START.astimezone():%m-%d %H:%M:%S}"
    assert [*first.values()] == [
        began, "killed", "0-1000", "500", "500", "1", "1.25 s", "1m40s", "1h00m", "29m09s 49%",
    ]  # fmt: skip
    assert (second["steps"], second["useful"], second["redone"]) == ("500-1500", "1000", "0")
    assert [*total.values()] == ["total", "", "", "1500", "500", "2", "2.5 s", "3m20s", "3h00m", "1h27m 49%"]


@pytest.mark.parametrize("width", [200, 120, 110, 100, 90, 80, 70, 60])
def test_narrow_terminal_drops_whole_columns(width: int) -> None:
    found = goodput([process(number) for number in range(12)])
    lines = printed(found, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    shown, whole = rows(lines), rows(printed(found, 200))
    assert shown[:-1] == [{name: row[name] for name in shown[0]} for row in whole[:-1]]
    assert shown[-1] == {name: whole[-1][name] for name in shown[0]} | {next(iter(shown[0])): "total"}
    assert {"ended", "useful", "redone", "useful time"} <= {*shown[0]}
    assert (len(shown[0]) == len(COLUMNS)) is (width >= 110)


@pytest.mark.parametrize("width", [1, 5, 20, 40])
def test_tiny_terminal_width_is_no_error(width: int) -> None:
    assert max(map(len, printed(goodput([process(0)]), width))) <= width


def test_table_shows_first_and_last_attempts() -> None:
    lines = printed(goodput([process(number) for number in range(1000)]))
    shown = rows(lines)
    assert len(shown) == MOST_ROWS + 2
    assert [each["steps"] for each in shown[:2]] == ["0-1000", "500-1500"]
    assert shown[MOST_ROWS // 2]["began"] == f"... {1000 - MOST_ROWS} more"
    assert shown[-2]["steps"] == f"{500 * 999}-{500 * 999 + 1000}"
    assert shown[-1]["useful"] == str(1000 * 500 + 500)
    few = rows(printed(goodput([process(number) for number in range(MOST_ROWS)])))
    assert len(few) == MOST_ROWS + 1


def test_table_without_steps_or_processes() -> None:
    (row, _) = rows(printed(goodput([process(0, stretches=[])])))
    assert (row["steps"], row["useful"]) == ("-", "0")
    lines = printed(Goodput())
    assert lines[0].strip() == "0 processes, useful time 0.0%"
    assert len(rows(lines)) == 1


@pytest.mark.parametrize("how", ["[red]x[/]", "[/]", "\x1b[31mred", ":smile:", "\n\n", "e" * 1000, "ℵ" * 50, "\udc80"])
def test_end_text_is_printed_without_markup(how: str) -> None:
    lines = printed(goodput([process(0, how=how)]))
    (row, _) = rows(lines)
    assert row["useful"] == "1000"
    assert "\x1b" not in "".join(lines)
    assert len(row["ended"]) <= 24
    assert row["ended"].startswith(how[:1] if how[:1].isprintable() else "?")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.00123, "0.00123 s"), (59.94, "59.9 s"), (59.96, "1m00s"), (119.6, "2m00s"), (3599.4, "59m59s"),
     (3599.6, "1h00m"), (86400 * 30, "720h00m")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
