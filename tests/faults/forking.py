"""Does something in a forked process, which tells what it sees as it goes: also one that is killed has told it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

LONGEST_S = 60
Tell = Callable[[str, Any], None]
Work = Callable[[Tell], None]


def started(work: Work, longest_s: int = LONGEST_S) -> tuple[int, int]:
    """Begin it: the process, and where it tells. What it raises it tells as "raised", and ends with 1."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    status = 1
    with contextlib.suppress(BaseException):  # the edge of a process
        os.close(read)

        def tell(what: str, value: Any) -> None:
            os.write(write, json.dumps([what, value]).encode() + b"\n")

        signal.alarm(longest_s)
        try:
            work(tell)
            status = 0
        except BaseException:  # noqa: BLE001  # the edge of a process: it is told to the other one
            tell("raised", traceback.format_exc())
    os._exit(status)


def ended(child: int, told: int) -> tuple[list[tuple[str, Any]], int]:
    """Wait for its end: what it told, and how it ended; a negative number is a signal's."""
    with os.fdopen(told, encoding="utf-8") as file:
        lines = [tuple(json.loads(line)) for line in file]
    return lines, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(work: Work, longest_s: int = LONGEST_S) -> tuple[list[tuple[str, Any]], int]:
    """Begin it, and wait for its end."""
    return ended(*started(work, longest_s))
