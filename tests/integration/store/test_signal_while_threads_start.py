"""A signal handler loads a checkpoint while the first load of the process starts its threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOADS = """
import os, signal, sys, threading
import numpy as np
import jaxckpt_train as jct
path = sys.argv[1]
jct.save(path, {"w": np.arange(100_000)})
signal.signal(signal.SIGUSR1, lambda *_: print("handler", jct.load(path)["w"].sum(), flush=True))
start, once = threading.Thread.start, [True]
def start_and_signal(self):
    start(self)
    if self.name.startswith("jaxckpt-read") and once:
        once.pop()
        os.kill(os.getpid(), signal.SIGUSR1)
threading.Thread.start = start_and_signal
print("load", jct.load(path)["w"].sum(), jct.load(path)["w"].sum())
"""


def test_load_in_signal_handler_succeeds(tmp_path: Path, run_python: Any) -> None:
    done = run_python(LOADS, tmp_path / "c", check=True, timeout_s=30)
    assert done.stdout.splitlines() == ["handler 4999950000", "load 4999950000 4999950000"]
