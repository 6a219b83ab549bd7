"""Fake programs of a cluster: executables in a directory at the front of PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # `python` is this Python there


def put_on_path(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a shell script of this name first on PATH, and return its `$LOG` file."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{name}.log"
    program = folder / name
    program.write_text(f"#!/bin/sh\nLOG={log}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{PATH}")
    return log


def in_slurm_job(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Set the variables of a job of `sbatch`."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "1234", **more}.items():
        monkeypatch.setenv(name, value)


def in_a_container(*command: str) -> list[str]:
    """Return a command line that runs the command as process 1 of a PID namespace, as in a container."""
    return ["unshare", "--pid", "--fork", "--mount-proc", *command]


def can_be_process_1() -> bool:
    """Return whether this system allows PID namespaces."""
    try:
        return subprocess.run(in_a_container("true"), capture_output=True, check=False).returncode == 0
    except OSError:
        return False
