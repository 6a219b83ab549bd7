"""A line on the terminal while a save or restore is being waited for; silence where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Literal

Advance = Callable[[int], None]


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
