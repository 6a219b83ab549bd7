"""Ownership of a directory after a fork: only the process that has it may use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunPython

pytestmark = pytest.mark.timeout(120)


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import jaxckpt_train as jct

manager = jct.StepManager(sys.argv[1], preservation_policy=jct.LatestN(2))
for step in (1, 2, 3):
    manager.save(step, {"state": {"w": np.full(10, step)}})
    manager.wait()
read, write = os.pipe()
child = os.fork()
if child == 0:
    messages = []
    for call in (lambda: manager.save(100, {"state": {"w": np.zeros(3)}}), lambda: manager.pin(3)):
        try:
            call()
        except jct.DirectoryLockedError as error:
            messages.append(str(error))
    manager.close()
    os.write(write, "\\n".join(messages).encode())
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(os.read(read, 10000).decode().count("a forked child"))
manager.save(4, {"state": {"w": np.full(10, 4)}})
manager.close()
print(jct.StepManager(sys.argv[1]).steps)
"""


def test_forked_child_cannot_use_manager_of_owner(tmp_path: Path, run_python: RunPython) -> None:
    assert run_python(FORKED, tmp_path / "run", check=True, timeout_s=60).stdout.split("\n")[:3] == ["7", "2", "[3, 4]"]


DAEMON = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import jaxckpt_train as jct
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend

manager = jct.StepManager(sys.argv[1])
child = os.fork()
if child == 0:
    for step in (1, 2):
        manager.save(step, {"state": {"w": np.full(10, step)}})
        manager.wait()
    lock = OwnerLock(LocalBackend(), sys.argv[1])
    held = lock.owner() is not None
    manager.close()
    os._exit(10 * held + (lock.owner() is not None))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), jct.StepManager(sys.argv[1]).steps)
"""


def test_unowned_manager_saves_in_forked_child(tmp_path: Path, run_python: RunPython) -> None:
    """As in a daemon whose parent process never saves."""
    assert run_python(DAEMON, tmp_path / "run", check=True, timeout_s=60).stdout == "10 [1, 2]\n"
