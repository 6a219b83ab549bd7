"""The standard streams of a command: what cannot be printed ends none of its work, and is told at its end.

What a command prints: tables and text for people, one JSON document for programs; and how it ends.

Arguments and options that several commands have.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import io
import logging
import math
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TextIO

import msgspec
import typer

from jaxckpt_train._validation import absolute_path, shown
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
from jaxckpt_train.inspection import units as quantities
from jaxckpt_train.inspection.units import progress_line, wants_progress
from jaxckpt_train.store.backends.local import LocalBackend

BACKEND = LocalBackend()
Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint, a step, or a run: its newest whole step; "
        "or what Orbax, PyTorch, safetensors or Flax have written.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATTERN]...",
        help="Leaf paths such as 'params/*/kernel' or 'opt_state/**'; none: all.",
        show_default=False,
    ),
]
Part = Annotated[
    str | None, typer.Option("--part", "-p", help="Which checkpointable; else all of them.", show_default=False)
]
WIDE = 10_000  # letters, where no terminal cuts lines
_log = logging.getLogger("jaxckpt_train")


def step_number(step: str | None) -> float | None:
    """The number of a step as a user gives it, of Flax also one with a fraction; None: none is given, or it is none."""
    if step is None:
        return None
    try:
        return int(step)  # not by way of a float, which would round a large one
    except ValueError:
        pass
    try:
        number = float(step)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def checked_step(step: str | None) -> str | None:
    """What is given as a step, or a wrong call if that is no number."""
    if step is not None and step_number(step) is None:
        raise typer.BadParameter(f"expected a number, such as 100 or 9.5, found {shown(step)}")
    return step


def step_option(*names: str, told: str) -> Any:
    """An option by which a step is chosen."""
    return typer.Option(*names, metavar="NUMBER", callback=checked_step, help=told, show_default=False)


Step = Annotated[str | None, step_option("--step", "-s", told="Of a run, also of Orbax or Flax: which step.")]


def absolute(path: str) -> str:
    """The absolute path that a user means.

    Raises:
        SettingsError: it is none.
    """
    return absolute_path("path", path)


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
def reported_errors(as_json: bool) -> Iterator[None]:
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


class _Stream(io.FileIO):
    """A standard stream; what nobody reads, or the system refuses, is dropped.

    Attributes:
        refusal: why the first of it was refused; None: nothing was, or nobody reads.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.refusal: OSError | None = None
        self._is_over = False

    def write(self, data: Any, /) -> int:
        """Write some of it, or drop all."""
        if not self._is_over:
            try:
                written: int | None = super().write(data)
                while written is None:  # whoever has called has made it so that it does not wait
                    select.select([], [self], [])
                    written = super().write(data)
                return written
            except OSError as error:
                self._is_over = True
                if not isinstance(error, BrokenPipeError):  # whoever reads has seen enough, as `head`
                    self.refusal = error
        return memoryview(data).nbytes


class _Teller(logging.Handler):
    """Tells what the package warns of as errors are told, a line for each, unless somebody keeps it for later."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(getattr(each, "keeps", False) for each in _log.handlers):
            print_error(record.getMessage())


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Within: a command is run, which exits at its end; with 4 if what it has printed was refused.

    Names may be any bytes, and a terminal may know ASCII only: what cannot be shown is printed as `\\udcff`. What was
    closed by who called stays silent, and no file that is opened gets its number. Streams that the caller has put in
    the place of Python's own stay as they are.
    """
    _take_closed_numbers()
    before, printed, teller = (sys.stdout, sys.stderr), _Stream(1), _Teller(logging.WARNING)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(sys.stdout, printed)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(sys.stderr, _Stream(2))
    _log.addHandler(teller)
    try:
        yield
    except SystemExit as ended:
        sys.stdout.flush()
        if printed.refusal is None:
            raise
        why = printed.refusal.strerror
        print_error(
            f"standard output: {why}; what was printed is not whole. It would have ended with {ended.code or 0}"
        )
        raise SystemExit(int(Code.REFUSED)) from None
    finally:
        _log.removeHandler(teller)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _take_closed_numbers() -> None:
    """A file that is opened gets the lowest number that is free: none must get that of a stream to be printed to."""
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _text(now: TextIO | None, stream: _Stream) -> TextIO:
    """A text stream in place of this one; None: Python has found it closed."""
    if now is None:
        return io.TextIOWrapper(io.BufferedWriter(stream), encoding="utf-8", errors="backslashreplace")
    now.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(stream),
        encoding=now.encoding,
        errors="backslashreplace",
        line_buffering=now is sys.stderr or now.isatty(),
    )
