"""A line on the terminal while a save or restore is being waited for; silence where there is no terminal.

Quantities as people read them: bytes, rates, seconds, times and plain numbers.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
from collections.abc import Callable, Iterator
from typing import Literal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
Advance = Callable[[int], None]


def bytes_text(nbytes: float | None) -> str:
    """A number of bytes; empty: not known."""
    if nbytes is None:
        return ""
    size, unit = scaled_bytes(nbytes)
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def scaled_bytes(nbytes: float) -> tuple[float, str]:
    """The same number in the unit in which it is below 1024, and that unit."""
    size = float(nbytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return size, unit
        size /= 1024
    return size, _UNITS[-1]


def rate_text(bytes_per_s: float | None) -> str:
    """Bytes a second; empty: not known."""
    return "" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def seconds_text(seconds: float | None) -> str:
    """A duration, from microseconds to days; empty: not known."""
    if seconds is None:
        return ""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0 s"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02} h"


def time_text(time: datetime.datetime | None) -> str:
    """A moment in UTC, to the second; empty: not known."""
    return "" if time is None else f"{time.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def number_text(value: float | None) -> str:
    """A number; empty: not known."""
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def count_text(value: int | None) -> str:
    """A whole number with commas; empty: not known."""
    return "" if value is None else f"{value:,}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: `counted(2, "save")` is "2 saves"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent_text(share: float) -> str:
    """A share from 0 to 1."""
    return f"{share:.1%}"


def clipped(text: str, letters: int = 160) -> str:
    """The begin of a text that a file may have made of any length."""
    return text if len(text) <= letters else f"{text[:letters]}..."


def wants_progress(setting: bool | Literal["auto"]) -> bool:
    """Whether to show progress: as said, or when standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if setting == "auto" else bool(setting)


@contextlib.contextmanager
def progress_line(text: str, total_bytes: int | None, shown: bool) -> Iterator[Advance | None]:
    """Show one line while the body runs, gone afterwards.

    Args:
        text: what is under way.
        total_bytes: how much there is to do; None if nobody knows.
        shown: False: do nothing.

    Yields:
        A function to call with numbers of bytes as they are done, from any thread; None if nothing is shown.
    """
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    if total_bytes is None:
        columns = columns[:2]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=total_bytes)
        yield lambda done: progress.advance(task, done)
