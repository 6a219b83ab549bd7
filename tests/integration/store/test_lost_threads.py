"""Threads that wait for a disk which does not answer: others work in their place, there are few, nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)
ANSWER_S = 60.0


AT_EXIT = """
import sys, threading
import numpy as np
import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.store import threads as workers
from tests.unit.store.test_lost_threads import HalfDeadBackend
checkpoint._BACKEND = HalfDeadBackend()
path = sys.argv[1] + "/dead/c"
jct.save(path, {f"x{n}": np.arange(300_000) + n for n in range(8)})
workers.GIVE_UP_S = 1.0
try:
    jct.load(path)
except jct.CheckpointTimeoutError:
    print("given up")
print("stuck", sum("read" in each.name for each in threading.enumerate()) > 0)
"""


def test_end_of_process_does_not_wait_for_them(run_python: Any, tmp_path: Path) -> None:
    done = run_python(AT_EXIT, tmp_path, check=True, timeout_s=ANSWER_S)
    assert done.stdout.split("\n")[:2] == ["given up", "stuck True"]
