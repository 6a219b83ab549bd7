"""Processes of a proof: started anew with this one's import path, waited for, and ended with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

# The path comes first: a fresh process imports this package, and the user's modules, from where this one does.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from jaxckpt_train.testing.child import main
main(sys.argv.pop())
"""


def run_child(plan: Path, log: Path, timeout_s: float) -> int | None:
    """Run a plan in a process of its own.

    Args:
        plan: the file of the plan.
        log: the file for what it prints.
        timeout_s: when it is ended.

    Returns:
        Its exit code, below 0 for the signal that has killed it; None: it had to be ended.
    """
    command = [sys.executable, "-u", "-c", _PROGRAM, str(plan), json.dumps(sys.path)]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    # It is not reaped until all is over, so that its number stays that of its session. What it has started, such as
    # workers of a data loader, is in that session, and would outlive a kill.
    waiter = threading.Thread(target=_wait_for, args=[process], name="resume-proof-wait", daemon=True)
    waiter.start()
    has_ended = False
    try:
        waiter.join(timeout_s)
        has_ended = not waiter.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        waiter.join()
        process.wait()
    return process.returncode if has_ended else None


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, and leave it to be reaped; on macOS, where Python before 3.13 cannot do that, reap it."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
