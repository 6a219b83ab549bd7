"""What a command prints: tables and text for people, one JSON document for programs; and how it ends."""

from __future__ import annotations

import contextlib
import datetime
import enum
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import typer

from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    DirectoryLockedError,
    FormatVersionError,
    IncompleteCheckpointError,
    MismatchError,
    NotACheckpointError,
    SettingsError,
    StorageError,
)
from jaxckpt_train.progress import progress_line, wants_progress
from jaxckpt_train.report import quantities

WIDE = 10_000  # letters, where no terminal cuts lines


class Code(enum.IntEnum):
    """How a command ends.

    0: it has done what it was asked, and found nothing wrong. 1: something differs, is damaged or cannot be read. 2: it
    was called wrongly. 3: there is no checkpoint. 4: the file system, or another process, was in the way.
    """

    FINE = 0
    WRONG = 1
    USAGE = 2
    NOTHING = 3
    REFUSED = 4


_CODES: tuple[tuple[type[CheckpointError], Code], ...] = (
    (IncompleteCheckpointError, Code.WRONG),
    (NotACheckpointError, Code.NOTHING),
    (CorruptCheckpointError, Code.WRONG),
    (FormatVersionError, Code.WRONG),
    (MismatchError, Code.USAGE),
    (SettingsError, Code.USAGE),
    (CheckpointExistsError, Code.REFUSED),
    (DirectoryLockedError, Code.REFUSED),
    (StorageError, Code.REFUSED),
    (CheckpointTimeoutError, Code.REFUSED),
)


def code_of(error: CheckpointError) -> Code:
    """How a command ends that has met an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.WRONG)


@contextlib.contextmanager
def told_errors(as_json: bool) -> Iterator[None]:
    """Within: an error of this package is told in a line, and ends the process with its code."""
    try:
        yield
    except CheckpointError as error:
        code = code_of(error)
        notes = getattr(error, "__notes__", [])
        if as_json:
            print_json({"error": type(error).__name__, "message": str(error), "notes": notes, "exit_code": int(code)})
        else:
            print_error(str(error), *notes)
        raise typer.Exit(int(code)) from error


def print_error(text: str, *notes: str) -> None:
    """Tell of an error, or warn, in one line and one for each note; nothing where standard error is closed."""
    if sys.stderr is not None:
        print(f"jaxckpt: {shown_text(text)}", *map(shown_text, notes), sep="\n", file=sys.stderr)


def print_text(text: str) -> None:
    """Print one line, whatever names are in it."""
    print(shown_text(text))


def print_json(value: Any) -> None:
    """One JSON document; what is not finite is text, since JSON has no such numbers."""
    text = msgspec.json.format(msgspec.json.encode(_plain(value)), indent=2)
    sys.stdout.write(text.decode(errors="backslashreplace") + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def print_columns(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Rows of text under headings, as wide as they need; right: which columns are numbers.

    Rich's tables take seconds for ten thousand rows.
    """
    rows = [[shown_text(cell) for cell in row] for row in rows]
    headings = [shown_text(cell) for cell in headings]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for row in [headings, *rows]:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    sys.stdout.write("\n".join(lines) + "\n")


def shown_text(text: str) -> str:
    """Text that a file says, in one line: nothing in it moves the cursor, or changes colours."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@contextlib.contextmanager
def progress(text: str, total_bytes: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """A line on the terminal while something long is under way; none where standard error is none."""
    with progress_line(text, total_bytes, wants_progress("auto") and not as_json) as advance:
        yield advance or (lambda nbytes: None)


def bytes_text(nbytes: int | None) -> str:
    """A number of bytes for people."""
    return "?" if nbytes is None else quantities.bytes_text(nbytes)


def age_text(seconds: float) -> str:
    """How long ago, for people."""
    for unit, width in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * width:
            return f"{seconds / width:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def number_text(value: float | None) -> str:
    """A number for people; empty for none."""
    return "" if value is None else f"{value:.6g}"
