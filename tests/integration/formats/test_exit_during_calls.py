"""A process that exits while other threads are in TensorStore has its own exit code, and is not aborted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.runs import REPO_ROOT

SCRIPT = """
import functools
import sys
import threading
import numpy as np
from jaxckpt_train.inspection.diff import pieces_of
from jaxckpt_train.inspection.runs import open_at
from jaxckpt_train.store.timeouts import BackgroundCall, start_call
from jaxckpt_train.store.copy import LazyBox
from jaxckpt_train.store.backends.local import LocalBackend

opened = open_at(LocalBackend(), sys.argv[1])
(array,) = opened.arrays().values()
begun = threading.Event()

def read(box):
    data = np.empty(box.nbytes, np.uint8)
    begun.set()
    for _ in range(100):  # until the process ends
        box.read_into(data)

for piece in list(pieces_of("x", [array]))[:2]:
    box = LazyBox(opened.files, opened.committed, array, piece.box, opened.settings)
    start_call(BackgroundCall(functools.partial(read, box)))
assert begun.wait(60)
sys.exit(7)
"""


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_process_that_exits_during_reads_is_not_aborted(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"x": np.random.default_rng(0).random((4, 4 << 20), np.float32)})
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "a")],
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (7, "")


AT_THE_END = """
import atexit
import sys

import jaxckpt_train as jct

atexit.register(lambda: print(jct.load(sys.argv[1])["x"].sum()))  # runs after those that are registered later
print(jct.load(sys.argv[1])["x"].sum())
"""


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_an_exit_function_may_load(tmp_path: Path, run_python: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"x": np.arange(1 << 20)})
    done = run_python(AT_THE_END, tmp_path / "a")
    total = str(sum(range(1 << 20)))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [total, total], "")
