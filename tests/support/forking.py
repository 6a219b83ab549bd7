"""Does something in a forked process, which tells what it sees as it goes: also one that is killed has told it.

One that hangs, or dies of a signal of its own, tells where each of its threads was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import IO, Any

LONGEST_S = 60
Tell = Callable[[str, Any], None]
Work = Callable[[Tell], None]


@dataclasses.dataclass(frozen=True)
class Child:
    """A process under way: its number, where it tells, and where it writes what its threads were at."""

    process: int
    told: int
    threads: IO[bytes]


def started(work: Work, longest_s: int = LONGEST_S) -> Child:
    """Begin it. What it raises it tells as "raised", and ends with 1; after `longest_s` it ends by SIGALRM."""
    threads = tempfile.TemporaryFile()  # noqa: SIM115  # `ended` closes it
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return Child(process, read, threads)
    status = 1
    with contextlib.suppress(BaseException):  # the edge of a process
        os.close(read)

        def tell(what: str, value: Any) -> None:
            os.write(write, json.dumps([what, value]).encode() + b"\n")

        _tell_threads_on_alarm(threads)
        signal.alarm(longest_s)
        try:
            work(tell)
            status = 0
        except BaseException:  # noqa: BLE001  # the edge of a process: it is told to the other one
            tell("raised", traceback.format_exc())
    os._exit(status)


def _tell_threads_on_alarm(file: IO[bytes]) -> None:
    """In C, so that a thread that holds the interpreter's lock for ever does not keep it from being told."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent had: in the end it is to kill
    faulthandler.register(signal.SIGALRM, file, all_threads=True, chain=True)
    faulthandler.enable(file, all_threads=True)  # and a crash


def ended(child: Child) -> tuple[list[tuple[str, Any]], int]:
    """Wait for its end: what it told, and how it ended; a negative number is a signal's."""
    with child.threads, os.fdopen(child.told, encoding="utf-8") as file:
        lines = [tuple(json.loads(line)) for line in file]
        status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
        child.threads.seek(0)
        threads = child.threads.read().decode("utf-8", "replace")
    return [*lines, *([("raised", f"ended with {status}:\n{threads}")] if threads else [])], status


def forked(work: Work, longest_s: int = LONGEST_S) -> tuple[list[tuple[str, Any]], int]:
    """Begin it, and wait for its end."""
    return ended(started(work, longest_s))
