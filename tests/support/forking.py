"""Run work in a forked process that reports as it goes, so that reports survive a kill.

A process that hangs or crashes also reports the stacks of its threads.
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
    """A running process: its number, its pipe of reports, and the file for the stacks of its threads."""

    process: int
    reports: int
    threads: IO[bytes]


def started(work: Work, longest_s: int = LONGEST_S) -> Child:
    """Start it. It reports an error as "raised" and exits with 1; after `longest_s` SIGALRM ends it."""
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
        except BaseException:  # noqa: BLE001  # the edge of a process: the parent gets it
            tell("raised", traceback.format_exc())
    os._exit(status)


def _tell_threads_on_alarm(file: IO[bytes]) -> None:
    """Write the stacks in C, so that a thread that never releases the GIL does not block them."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it must end the process, whatever the handler of the parent
    faulthandler.register(signal.SIGALRM, file, all_threads=True, chain=True)
    faulthandler.enable(file, all_threads=True)  # also at a crash


def ended(child: Child) -> tuple[list[tuple[str, Any]], int]:
    """Wait for its end; return its reports and its exit code, negative for a signal."""
    with child.threads, os.fdopen(child.reports, encoding="utf-8") as file:
        lines = [tuple(json.loads(line)) for line in file]
        status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
        child.threads.seek(0)
        threads = child.threads.read().decode("utf-8", "replace")
    return [*lines, *([("raised", f"ended with {status}:\n{threads}")] if threads else [])], status


def forked(work: Work, longest_s: int = LONGEST_S) -> tuple[list[tuple[str, Any]], int]:
    """Start it, and wait for its end."""
    return ended(started(work, longest_s))
