"""End a process that is already ending with another exit code.

An exit function cannot set the exit code, and calling the remaining ones from there would call functions that are
already running, in which some native libraries deadlock. So `end_process` skips them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading

INTERRUPTED = 128 + signal.SIGINT  # the convention of shells


def code_of(stop: BaseException) -> int:
    """Return the exit code of a process that an exception of a signal handler ends early; it is never 0."""
    if isinstance(stop, KeyboardInterrupt):
        return INTERRUPTED
    code = stop.code if isinstance(stop, SystemExit) else None
    return (code & 0xFF if isinstance(code, int) else 0) or 1


def end_process(code: int, *, in_child: bool) -> None:
    """End the process now, after stopping daemon processes and flushing log handlers and standard streams.

    If a child of `multiprocessing` has an error, it reports that and ends with 1.
    """
    if in_child and sys.version_info < (3, 13) and threading.current_thread() is threading.main_thread():
        if isinstance(sys.exception(), SystemExit | None):
            raise SystemExit(code)
        return
    with contextlib.suppress(Exception):
        for child in sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else ():
            if child.daemon:
                child.terminate()
        logging.shutdown()
    try:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, missing, or its reader is gone
                stream.flush()  # type: ignore[union-attr]
    finally:  # a user's stream may raise any error
        os._exit(code)
