"""Starts the command: an interrupt while its modules are imported ends it with 130, as one in its midst does."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

INTERRUPTED = 130


def main() -> None:
    """Import the command, and run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever called wants none
    is_usual = is_usual and threading.current_thread() is threading.main_thread()
    if is_usual:
        signal.signal(signal.SIGINT, _leave)
    from jaxckpt_train.cli.app import main as run

    try:
        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command has begun, or when it has ended
        raise SystemExit(INTERRUPTED) from None


def _leave(number: int, frame: Any) -> None:
    """Nothing is begun yet, and a half-imported module may take an exception for something else."""
    os._exit(INTERRUPTED)
