"""The entry point of `jaxckpt` and of `python -m jaxckpt_train.cli`.

Ctrl-C ends the command with exit code 130, also while its modules are still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130


def main() -> None:
    """Import the command and run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise keep the caller's
    is_usual = is_usual and threading.current_thread() is threading.main_thread()
    if is_usual:
        signal.signal(signal.SIGINT, _leave)
    from jaxckpt_train.cli.main import main as run

    try:
        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command starts, or after it ended
        _hurry()
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _hurry()
        raise


def _hurry() -> None:
    """Do not wait at exit for a disk that another library uses and that does not respond."""
    if "jaxckpt_train.formats.foreign" in sys.modules:
        from jaxckpt_train.formats.foreign import shorten_exit_wait

        shorten_exit_wait()


def _leave(number: int, frame: Any) -> None:
    """Exit at once: no work has started, and a module that is being imported could misinterpret an exception."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
