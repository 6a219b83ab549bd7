"""A disk that can be read but does not answer writes does not block the end of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)


AT_EXIT = """
import sys
import numpy as np
import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.store import threads
from tests.unit.test_unresponsive_disk import Stuck
stuck = Stuck()
checkpoint.backend_for, threads.GIVE_UP_S = lambda _: stuck, 1.0
try:
    jct.save_async(sys.argv[1] + "/c", {"w": np.ones(3)})
except jct.CheckpointTimeoutError:
    print("reported")
"""


def test_stuck_disk_does_not_block_the_exit(run_python: Any, tmp_path: Path) -> None:
    assert run_python(AT_EXIT, tmp_path, check=True, timeout_s=45).stdout == "reported\n"
