"""Input and output that the commands share: arguments, exit codes, errors, tables, JSON and the standard streams."""

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

from jaxckpt_train._validation import absolute_path, local_directory, shown
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    DirectoryLockedError,
    IncompleteCheckpointError,
    MismatchError,
    NotACheckpointError,
    SettingsError,
    StorageError,
)
from jaxckpt_train.inspection.units import progress_line, wants_progress
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.by_path import backend_for

BACKEND = backend_for(StoreSettings())
MOST_EXACT = 1 << 53  # of integers in JSON
_log = logging.getLogger("jaxckpt_train")


def option(help_text: str, *names: str, metavar: str | None = None, least: int | None = None) -> Any:
    """Return an option whose default is not shown in the help."""
    return typer.Option(*names, metavar=metavar, help=help_text, min=least, show_default=False)


def argument(metavar: str, help_text: str) -> Any:
    """Return an argument whose default is not shown in the help."""
    return typer.Argument(metavar=metavar, help=help_text, show_default=False)


def step_option(help_text: str, *names: str) -> Any:
    """Return an option that selects a step."""
    return typer.Option(*names, metavar="NUMBER", parser=_step_number, help=help_text, show_default=False)


def _step_number(step: str) -> float:
    """Parse the number of a step, which Flax allows to have a fraction."""
    for kind in (int, float):  # a float would round large numbers
        with contextlib.suppress(ValueError):
            number: float = kind(step)
            if math.isfinite(number):
                return number
    raise typer.BadParameter(f"expected a number, such as 100 or 9.5, found {shown(step)}")


Run = Annotated[str, argument("RUN", "Directory of a run.")]
Checkpoint = Annotated[
    str,
    argument(
        "PATH",
        "A checkpoint, a step, or a run, which means its newest valid step; "
        "or a checkpoint of Orbax, PyTorch, safetensors or Flax.",
    ),
]
FastTier = Annotated[
    str | None,
    option("The directory of the fast tier on this host, as in the settings of the run.", "--fast-tier", metavar="DIR"),
]
FAST_TIER_HINT = "the run has a fast tier: --fast-tier DIR shows its steps on this host"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Step = Annotated[float | None, step_option("The step of a run, also of a run of Orbax or Flax.", "--step", "-s")]


def absolute(path: str) -> str:
    """Return the absolute form of a path."""
    return absolute_path("path", path)


def host_directory(path: str) -> str:
    """Return the absolute form of the directory of a fast tier."""
    return local_directory("--fast-tier", path)


class Code(enum.IntEnum):
    """The exit codes, which docs/reference/cli.md explains."""

    FINE = 0
    WRONG = 1
    USAGE = 2
    NOTHING = 3
    REFUSED = 4


_CODES: dict[type[CheckpointError], Code] = {  # all others: WRONG
    IncompleteCheckpointError: Code.WRONG,  # a NotACheckpointError
    NotACheckpointError: Code.NOTHING,
    MismatchError: Code.USAGE,
    SettingsError: Code.USAGE,
    CheckpointExistsError: Code.REFUSED,
    DirectoryLockedError: Code.REFUSED,
    StorageError: Code.REFUSED,
    CheckpointTimeoutError: Code.REFUSED,
}


def code_of(error: CheckpointError) -> Code:
    """Return the exit code for an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), Code.WRONG)


def print_error(text: str, *notes: str) -> None:
    """Print an error or a warning in one line, and each note in another. Does nothing if standard error is closed."""
    if sys.stderr is not None:
        print(f"jaxckpt: {shown_text(text)}", *map(shown_text, notes), sep="\n", file=sys.stderr)


def print_text(text: str) -> None:
    """Print one line, with characters that are not printable escaped."""
    print(shown_text(text))


def print_json(value: Any) -> None:
    """Print one JSON document. Numbers that JSON does not have, or that its readers would round, become text."""
    text = msgspec.json.format(msgspec.json.encode(_plain(value)), indent=2)
    sys.stdout.write(text.decode(errors="backslashreplace") + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > MOST_EXACT):
        return str(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, str | bytes | complex):
        return str(value).encode("utf-8", "backslashreplace").decode()
    return value


def print_columns(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Print rows under headings. `right` says which columns are aligned to the right.

    Rich's tables are not used: they take seconds for ten thousand rows.
    """
    lines = []
    columns = [list(map(shown_text, column)) for column in zip(headings, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    sys.stdout.write("\n".join(lines) + "\n")


def shown_text(text: str) -> str:
    """Escape text from a file, so that it stays in one line and cannot move the cursor or change colours."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@contextlib.contextmanager
def progress(text: str, total_bytes: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress line while the body runs, if standard error is a terminal."""
    with progress_line(text, total_bytes, wants_progress("auto") and not as_json) as advance:
        yield advance or (lambda nbytes: None)


class _Stream(io.FileIO):
    """A standard stream that drops the output which cannot be written.

    Attributes:
        refusal: the first error of a write; None if there was none, or the reader closed the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.refusal: OSError | None = None
        self._is_over = False

    def write(self, data: Any, /) -> int:
        """Write a part of the data, or drop all of it."""
        if not self._is_over:
            try:
                written: int | None = super().write(data)
                while written is None:  # the stream is non-blocking, perhaps for another process that shares it
                    select.select([], [self], [])
                    written = super().write(data)
                return written
            except OSError as error:
                self._is_over = True
                if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, like `head`
                    self.refusal = error
        return memoryview(data).nbytes


class _WarningPrinter(logging.Handler):
    """Prints the warnings of the package like errors, unless another handler keeps them for later."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(getattr(each, "keeps", False) for each in _log.handlers):
            print_error(record.getMessage())


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command in the body, and exit with 4 if its output could not be written.

    File names can be any bytes, and a terminal may support ASCII only: other characters are printed as `\\udcff`. A
    stream that the caller closed stays silent, and its descriptor is not given to a file. Streams that replace
    Python's own are kept.
    """
    _occupy_closed_descriptors()
    before, printed, printer = (sys.stdout, sys.stderr), _Stream(1), _WarningPrinter(logging.WARNING)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(sys.stdout, printed)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(sys.stderr, _Stream(2))
    _log.addHandler(printer)
    try:
        yield
    except SystemExit as ended:
        sys.stdout.flush()
        if printed.refusal is None:
            raise
        why = printed.refusal.strerror
        print_error(f"standard output: {why}; the output is incomplete. The exit code would be {ended.code or 0}")
        raise SystemExit(int(Code.REFUSED)) from None
    finally:
        _log.removeHandler(printer)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _occupy_closed_descriptors() -> None:
    """Open /dev/null for each closed standard stream, so that no data file gets its descriptor and the output."""
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _text(now: TextIO | None, stream: _Stream) -> TextIO:
    """Return a text stream that replaces `now`, which is None if Python found the stream closed."""
    if now is not None:
        now.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(stream),
        encoding="utf-8" if now is None else now.encoding,
        errors="backslashreplace",
        line_buffering=now is not None and (now is sys.stderr or now.isatty()),
    )
