"""The standard streams of a command: what cannot be printed ends none of its work, and is told at its end."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from jaxckpt_train.cli.output import Code, print_error

_log = logging.getLogger("jaxckpt_train")


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
