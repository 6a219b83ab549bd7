"""Worker threads in a forked child, and while the interpreter exits."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.checkpoints import load

FORKED = """
import os, sys, warnings
import numpy as np
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.checkpoints import commit
warnings.simplefilter("ignore")
arrays = {f"x{n}": np.arange(300_000) for n in range(8)}
tiny = StoreSettings(segment_bytes=1 << 20, staging_bytes=1 << 20)
commit(LocalBackend(), sys.argv[1] + "/parent", arrays, tiny)
child = os.fork()
if child == 0:
    commit(LocalBackend(), sys.argv[1] + "/child", arrays, tiny)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_its_own_threads(run_python: Any, tmp_path: os.PathLike[str]) -> None:
    run_python(FORKED, tmp_path, check=True, timeout_s=60)
    found = load(LocalBackend(), f"{tmp_path}/child", StoreSettings())
    assert np.array_equal(found["x7"][0], np.arange(300_000))


AT_EXIT = """
import sys
import numpy as np
import jaxckpt_train as jct
tree = {f"x{n}": np.arange(500_000) + n for n in range(8)}
settings = jct.StoreSettings(segment_bytes=1 << 20, staging_bytes=1 << 20)
pending = jct.save_async(sys.argv[1] + "/a", tree, settings=settings)
if sys.argv[2] == "raises":
    raise ZeroDivisionError("of the loop")
"""


@pytest.mark.parametrize("end", ["ends", "raises"])
def test_running_save_is_committed_at_script_end(run_python: Any, tmp_path: Any, end: str) -> None:
    done = run_python(AT_EXIT, tmp_path, end)
    assert done.returncode == (1 if end == "raises" else 0), done.stderr
    assert ("ZeroDivisionError: of the loop" in done.stderr) is (end == "raises")
    found = load(LocalBackend(), f"{tmp_path}/a", StoreSettings())
    assert sorted(found) == [f"x{n}" for n in range(8)]
    assert np.array_equal(found["x5"][0], np.arange(500_000) + 5)
