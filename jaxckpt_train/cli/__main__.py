"""`python -m jaxckpt_train.cli`.

Starts the command: an interrupt while its modules are imported ends it with 130, as one in its midst does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130
DECODES = ("import",)
"""Commands that have other libraries decode large chunks."""
IMPORT = "from jaxckpt_train.cli.__main__ import main"
LAUNCHER = (
    "#", '"""exec" ', '" """', "import re", "import sys", IMPORT, 'if __name__ == "__main__":',
    "if sys.argv[0].endswith(", "elif sys.argv[0].endswith(", "sys.argv[0] = ", "sys.exit(main())",
)  # fmt: skip
"""How lines of the script begin that pip, uv and others install for the command."""


def main() -> None:
    """Import the command, and run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever called wants none
    is_usual = is_usual and threading.current_thread() is threading.main_thread()
    if is_usual:
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] and sys.argv[1] in DECODES and _is_a_process_of_its_own():
        from jaxckpt_train.store.process_identity import finish_restart, restart_with_huge_malloc

        finish_restart()
        restart_with_huge_malloc(sys.orig_argv)
    from jaxckpt_train.cli.main import main as run

    try:
        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command has begun, or when it has ended
        _hurry()
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _hurry()
        raise


def _hurry() -> None:
    """Wait for no disk that does not answer, if one was asked through another library."""
    if "jaxckpt_train.formats.foreign" in sys.modules:
        from jaxckpt_train.formats.foreign import shorten_exit_wait

        shorten_exit_wait()


def _is_a_process_of_its_own() -> bool:
    """Whether this process was begun for the command alone, by its name or by `python -m`: it can begin again then."""
    words = sys.orig_argv[1:]
    if words[:2] == ["-m", "jaxckpt_train.cli"]:
        return words[2:] == sys.argv[1:]
    source = getattr(getattr(sys.modules["__main__"], "__loader__", None), "get_source", None)
    return words == sys.argv and source is not None and _is_launcher(source("__main__") or "")


def _is_launcher(script: str) -> bool:
    """Whether a script does nothing but call this command, as installers write it: another one would do it twice."""
    lines = [line.strip().replace("'", '"') for line in script.splitlines()]
    return IMPORT in lines and all(not line or line.startswith(LAUNCHER) for line in lines)


def _leave(number: int, frame: Any) -> None:
    """Nothing is begun yet, and a half-imported module may take an exception for something else."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
