"""Prints the goodput of a run as one table."""

from __future__ import annotations

import datetime
from typing import IO

from rich.console import Console
from rich.table import Table

from jaxckpt_train.steps.goodput import AttemptGoodput, Goodput

COLUMNS = ("began", "ended", "steps", "useful", "redone", "saves", "blocked", "resume", "wall", "useful time")
MOST_ROWS = 40
LEAST_WIDTH = 120  # where there is no terminal to tell


def print_goodput(found: Goodput, file: IO[str] | None = None) -> None:
    """Print one line for each process of a run, and the totals; of very many the first and the last.

    Args:
        found: the goodput.
        file: where to; None: standard output.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    console.print(_table(found))


def _table(found: Goodput) -> Table:
    between = "" if found.between_s == 0 else f"; between processes {_duration(found.between_s)}"
    table = Table(
        title=f"{len(found.attempts)} processes, useful time {found.share:.1%}{between}", title_justify="left"
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    rows, left_out = [*found.attempts], len(found.attempts) - MOST_ROWS
    for row in rows if left_out <= 0 else rows[: MOST_ROWS // 2]:
        table.add_row(*_cells(row))
    if left_out > 0:
        table.add_row(f"... {left_out} more", *[""] * (len(COLUMNS) - 1))
        for row in rows[-MOST_ROWS // 2 :]:
            table.add_row(*_cells(row))
    table.add_section()
    totals = [str(found.useful_steps), str(found.redone_steps), str(found.saves), _duration(found.blocked_s)]
    totals += [_duration(found.to_resume_s), _duration(found.wall_s), f"{_duration(found.useful_s)} {found.share:.0%}"]
    table.add_row("total", "", "", *totals)
    return table


def _cells(row: AttemptGoodput) -> list[str]:
    share = row.useful_s / row.wall_s if row.wall_s > 0 else 0.0
    numbers = (f"{row.first_step}-{row.last_step}", row.useful_steps, row.redone_steps, row.saves)
    times = [_duration(row.blocked_s), _duration(row.to_resume_s), _duration(row.wall_s)]
    return [_moment(row.began), row.how, *map(str, numbers), *times, f"{_duration(row.useful_s)} {share:.0%}"]


def _moment(time: datetime.datetime) -> str:
    return f"{time.astimezone():%m-%d %H:%M:%S}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes}m{round(seconds) % 60:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
