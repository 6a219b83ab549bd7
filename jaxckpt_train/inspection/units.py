"""Quantities as text for people, and a progress line on a terminal. Unknown quantities are the empty text."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from typing import Literal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
Advance = Callable[[int], None]


def bytes_text(nbytes: float | None) -> str:
    """Format a number of bytes."""
    if nbytes is None:
        return ""
    size, unit = scaled_bytes(nbytes)
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def scaled_bytes(nbytes: float) -> tuple[float, str]:
    """Return a number of bytes in the unit in which it is below 1024, and that unit."""
    size = float(nbytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return size, unit
        size /= 1024
    return size, _UNITS[-1]


def rate_text(bytes_per_s: float | None) -> str:
    """Format bytes per second."""
    return "" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def seconds_text(seconds: float | None) -> str:
    """Format a duration, from microseconds to days."""
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


def age_text(seconds: float) -> str:
    """Format an age in its largest unit."""
    for unit, width in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * width:
            return f"{seconds / width:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def time_text(time: datetime.datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return "" if time is None else f"{time.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def number_text(value: float | None) -> str:
    """Format a number."""
    return "" if value is None else f"{value:.6g}"


def count_text(value: int | None) -> str:
    """Format a whole number with commas."""
    return "" if value is None else f"{value:,}"


def counted(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `counted(2, "save")` is "2 saves"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent_text(fraction: float) -> str:
    """Format a fraction from 0 to 1."""
    return f"{fraction:.1%}"


def clipped(text: str, limit: int = 160) -> str:
    """Return the beginning of a text from a file, which may be of any length."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def wants_progress(setting: bool | Literal["auto"]) -> bool:
    """Return whether to show progress: the setting, or for "auto" whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if setting == "auto" else bool(setting)


@contextlib.contextmanager
def progress_line(text: str, total_bytes: int | None, shown: bool) -> Iterator[Advance | None]:
    """Show a progress line while the block runs, and remove it afterwards.

    Yields a function that any thread calls with the number of bytes done, or None if nothing is `shown`.
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
