"""Runs that cannot be compared: they crash, hang, never save, or continue after an error."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt_train as jct


def train(directory: Path, fault: str = "", updates: int = 6) -> None:
    """Train, with one fault."""
    if fault == "another place":
        directory = directory.parent / "elsewhere"
    if fault == "a new place each time":
        directory = directory / f"run-{len(list(directory.iterdir()))}"
    interval = 100 if fault == "no save" else 2
    signals = () if fault == "no signals" else ("SIGTERM",)
    enabled = fault != "switched off"
    with jct.CheckpointCallback(directory, save_interval_steps=interval, signals=signals, enabled=enabled) as ckpt:
        start = {"w": np.zeros(2)}
        state: dict[str, Any] = start if fault == "no resume" else ckpt.resume(start)
        if fault == "two loops":
            ckpt.resume(state)
        for step in ckpt.steps(updates):
            if fault == "crash" and step == 1:
                raise ValueError("the loss went to the dogs")
            if fault == "crash after the resume" and ckpt.completed_steps >= 2 and list(directory.glob("step-*2")):
                raise ValueError("no such file: it was in /tmp")
            if fault == "hang" and step == 1:
                hang(directory)
            state = {"w": state["w"] + 1}
            try:
                ckpt(state)
            except Exception:  # the fault under test
                if fault != "error caught":
                    raise


def hang(directory: Path) -> None:
    """Wait without end, as in a deadlock; a child process waits too."""
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (directory / "worker.txt").write_text(str(worker.pid))
    threading.Event().wait()
