"""Stand-ins for programs of a cluster: executables in a directory that is put first on PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # `python` is this Python there


def put_on_path(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell script of this name, found before all others; the file that `$LOG` names is returned."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{name}.log"
    program = folder / name
    program.write_text(f"#!/bin/sh\nLOG={log}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{PATH}")
    return log


def in_slurm_job(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """The variables of a job of `sbatch`."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "1234", **more}.items():
        monkeypatch.setenv(name, value)


def in_a_container(*command: str) -> list[str]:
    """The command line that runs another as process 1 of a name space of processes, as a container has."""
    return ["unshare", "--pid", "--fork", "--mount-proc", *command]


def can_be_process_1() -> bool:
    """Whether this system lets that be done."""
    try:
        return subprocess.run(in_a_container("true"), capture_output=True, check=False).returncode == 0
    except OSError:
        return False
