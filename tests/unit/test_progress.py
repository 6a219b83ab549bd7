"""The progress line: there for people at a terminal, silent for everybody else."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxckpt_train.inspection.units import progress_line, wants_progress
from tests.conftest import REPO_ROOT
from tests.support.runs import made_run

RESUME = """
import sys
import jaxckpt_train as jct
from tests.support.runs import state_of
with jct.CheckpointCallback(sys.argv[1], progress="auto") as ckpt:
    state = ckpt.resume(state_of(0))
"""


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_is_wanted_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not wants_progress("auto")
    assert wants_progress(True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_progress("auto")
    assert not wants_progress(False)
    monkeypatch.setattr(sys, "stderr", None)
    assert not wants_progress("auto")


def test_nothing_is_shown_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_line("restoring", 10, shown=False) as advance:
        assert advance is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("total", [1000, None])
def test_a_shown_line_counts_from_any_thread_and_leaves_standard_output_alone(
    total: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress_line("restoring", total, shown=True) as advance:
        assert advance is not None
        threads = [threading.Thread(target=advance, args=(100,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert capfd.readouterr().out == ""


def test_an_error_inside_comes_out() -> None:
    with pytest.raises(ValueError, match="own"), progress_line("restoring", 10, shown=True):
        raise ValueError("own")


def resume_at_a_terminal(run: Path) -> tuple[int, str]:
    """A script that resumes, with a terminal as its standard error; its exit code and what the terminal showed."""
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


def test_a_restore_at_a_terminal_shows_a_line_that_goes_again(tmp_path: Path) -> None:
    code, shown = resume_at_a_terminal(made_run(tmp_path, 1))
    assert code == 0
    assert "restoring" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_a_damaged_newest_step_does_not_stop_a_restore_at_a_terminal(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    (run / "step-0000000002" / "manifest.json").unlink()
    code, shown = resume_at_a_terminal(run)
    assert code == 0, shown
    assert "step 2 cannot be restored and is skipped" in shown.replace("\r\n", "")
