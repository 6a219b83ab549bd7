"""A process exits although its threads are stuck in a call to an unresponsive disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)
RESPONSE_S = 60.0


AT_EXIT = """
import sys, threading
import numpy as np
import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.store import threads
from tests.unit.store.test_lost_threads import HalfDeadBackend
half_dead = HalfDeadBackend()
checkpoint.backend_for = lambda _: half_dead
path = sys.argv[1] + "/dead/c"
jct.save(path, {f"x{n}": np.arange(300_000) + n for n in range(8)})
threads.GIVE_UP_S = 1.0
try:
    jct.load(path)
except jct.CheckpointTimeoutError:
    print("timed out")
print("stuck", sum("read" in each.name for each in threading.enumerate()) > 0)
"""


def test_process_exit_does_not_wait_for_stuck_threads(run_python: Any, tmp_path: Path) -> None:
    done = run_python(AT_EXIT, tmp_path, check=True, timeout_s=RESPONSE_S)
    assert done.stdout.split("\n")[:2] == ["timed out", "stuck True"]
