"""Prints the goodput of a run as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table

from jaxckpt_train.steps.goodput import AttemptGoodput, Goodput

COLUMNS = ("began", "ended", "steps", "useful", "redone", "saves", "blocked", "resume", "wall", "useful time")
LESS_NEEDED = ("resume", "blocked", "saves", "began", "steps", "wall")  # left out in this order where all are too wide
MOST_ROWS = 40
MOST_SHOWN = 24  # letters of how a process has ended
LEAST_WIDTH = 120  # where there is no terminal to tell


def print_goodput(found: Goodput, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print one line for each process of a run, and the totals; of very many the first and the last.

    Args:
        found: the goodput.
        file: where to; None: standard output.
        width: in letters. None: that of the terminal, or what is needed where there is none.
    """
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    names = [*COLUMNS]
    for name in LESS_NEEDED:
        if console.measure(_table(found, names), options=console.options.update(width=1000)).maximum > console.width:
            names.remove(name)
    console.print(_table(found, names))


def _table(found: Goodput, names: Sequence[str]) -> Table:
    processes = "1 process" if len(found.attempts) == 1 else f"{len(found.attempts)} processes"
    between = "" if found.between_s == 0 else f"; between processes {_duration(found.between_s)}"
    table = Table(title=f"{processes}, useful time {found.share:.1%}{between}", title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)

    def add(cells: dict[str, str]) -> None:
        table.add_row(*(cells.get(name, "") for name in names))

    rows, left_out = [*found.attempts], len(found.attempts) - MOST_ROWS
    for row in rows if left_out <= 0 else rows[: MOST_ROWS // 2]:
        add(_cells(row))
    if left_out > 0:
        add({names[0]: f"... {left_out} more"})
        for row in rows[-MOST_ROWS // 2 :]:
            add(_cells(row))
    table.add_section()
    add({names[0]: "total", **_amounts(found, found.share)})
    return table


def _cells(row: AttemptGoodput) -> dict[str, str]:
    share = min(1.0, row.useful_s / row.wall_s) if row.wall_s > 0 else 0.0
    return {
        "began": f"{row.began.astimezone():%m-%d %H:%M:%S}",
        "ended": "".join(letter if letter.isprintable() else "?" for letter in row.how[:MOST_SHOWN]),  # as a file says
        "steps": "-" if row.first_step is None else f"{row.first_step}-{row.last_step}",
        **_amounts(row, share),
    }


def _amounts(of: AttemptGoodput | Goodput, share: float) -> dict[str, str]:
    return {
        "useful": str(of.useful_steps),
        "redone": str(of.redone_steps),
        "saves": str(of.saves),
        "blocked": _duration(of.blocked_s),
        "resume": _duration(of.to_resume_s),
        "wall": _duration(of.wall_s),
        "useful time": f"{_duration(of.useful_s)} {share:.0%}",
    }


def _duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes}m{round(seconds) % 60:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
