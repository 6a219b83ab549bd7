"""`jaxckpt cp`: a running run is not copied into, and a terminal shows the progress."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jaxckpt_train as jct
from tests.conftest import REPO_ROOT
from tests.support.commands import OWNER, json_of, refused
from tests.support.runs import (
    made_run,
    talking_to,
)


def test_copy_into_a_running_run_is_refused(tmp_path: Path) -> None:
    directory, other = made_run(tmp_path / "run", 1), made_run(tmp_path / "other", 7)
    with talking_to(OWNER, other) as owner:
        assert owner.read() == "owned"
        assert f"owned by process {owner.process.pid}" in refused("cp", directory, other, code=4)
        json_of("cp", other, tmp_path / "copy")  # a copy from it is allowed
    json_of("cp", directory, other)  # the owner is dead
    assert jct.StepManager(other).steps == [1, 7]


def test_progress_is_shown_at_a_terminal(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "jaxckpt_train.cli", "cp", str(directory), str(tmp_path / "copy")]
        environment = {"PYTHONPATH": str(REPO_ROOT), "TERM": "xterm"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, check=True, timeout=60)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # that is how a terminal ends
            while piece := terminal.read(4096):
                shown += piece
    assert b"copying" in shown
    assert done.stdout.endswith(b" copied\n")
