"""The progress line: shown at a terminal, and silent elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import REPO_ROOT
from tests.support.runs import made_run

RESUME = """
import sys
import jaxckpt_train as jct
from tests.support.runs import state_of
with jct.CheckpointCallback(sys.argv[1], progress="auto") as ckpt:
    state = ckpt.resume(state_of(0))
"""


def resume_at_a_terminal(run: Path) -> tuple[int, str]:
    """Run a script that resumes at a terminal, and return its exit code and what the terminal showed."""
    ours, its = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # what a terminal answers once its last user is gone
                return
            shown.extend(data)

    reader = threading.Thread(target=read)
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "TERM": "xterm", "JAX_NUM_CPU_DEVICES": "1"}
    process = subprocess.Popen([sys.executable, "-c", RESUME, str(run)], stderr=its, stdout=its, env=environment)
    os.close(its)
    reader.start()
    code = process.wait(120)
    reader.join()
    os.close(ours)
    return code, shown.decode()


def test_restore_at_terminal_clears_its_progress_line(tmp_path: Path) -> None:
    code, shown = resume_at_a_terminal(made_run(tmp_path, 1))
    assert code == 0
    assert "restoring" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_damaged_step_does_not_stop_restore_at_terminal(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    (run / "step-0000000002" / "manifest.json").unlink()
    code, shown = resume_at_a_terminal(run)
    assert code == 0, shown
    assert "step 2 cannot be restored" in shown.replace("\r\n", "")
