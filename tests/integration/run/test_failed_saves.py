"""A save that fails in the background: its error is raised once, and the committed steps stay as they are."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from tests.conftest import RunPython
from tests.support.runs import step_of

LOST = """
import errno, sys
import jaxckpt_train as jct
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import save_steps, state_of
manager = jct.StepManager(sys.argv[1], backend=RefusingBackend("create", "step-0000000002", errno.EIO, 1))
save_steps(manager, 1)
manager.save(2, {"state": state_of(2)})
if sys.argv[2] == "raise":
    raise ValueError("the loop's own error")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The mount point of a file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int) -> Path:
    """Write a file that leaves only `leave_bytes` of free space."""
    status = os.statvfs(folder)
    path = folder / "filler"
    path.write_bytes(bytes(status.f_bavail * status.f_frsize - leave_bytes))
    return path


def big_state(step: int) -> dict[str, object]:
    return {"w": jnp.full(150_000, step, jnp.float32), "step": jnp.int32(step)}


@pytest.mark.parametrize("when", ["wait", "save", "close"])
def test_full_disk_raises_at_next_call(small_disk: Path, when: str) -> None:
    run = small_disk / "run"
    manager = jct.StepManager(run)
    manager.save(1, {"state": big_state(1)})
    manager.wait()
    filler = fill(small_disk, 100_000)
    pending = manager.save(2, {"state": big_state(2)}).pending
    assert pending is not None
    pending.committed.exception()
    calls = {"wait": manager.wait, "save": lambda: manager.save(3, {"state": big_state(3)}), "close": manager.close}
    with pytest.raises(OSError, match="step-0000000002") as caught:
        calls[when]()
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, jct.StorageError)
    assert caught.value.__notes__[0] == f"while saving step 2 to {run} in the background"
    assert (manager.latest, manager.steps) == (1, [1])
    assert float(manager.restore()["state"]["w"][0]) == 1
    assert not [name for name in os.listdir(run) if ".tmp-" in name]
    filler.unlink()
    if when != "close":
        manager.save(3, {"state": big_state(3)})
        manager.close()
        assert float(jct.StepManager(run).restore()["state"]["w"][-1]) == 3


def test_unawaited_failure_sets_exit_code(tmp_path: Path, run_python: RunPython) -> None:
    done = run_python(LOST, tmp_path, "end")
    assert done.returncode == 1
    assert f"saving step 2 to {tmp_path} failed" in done.stderr
    assert "refused to create" in done.stderr
    assert step_of(jct.StepManager(tmp_path).restore()) == 1


def test_script_that_raises_shows_its_own_error_too(tmp_path: Path, run_python: RunPython) -> None:
    done = run_python(LOST, tmp_path, "raise")
    assert done.returncode == 1
    assert "ValueError: the loop's own error" in done.stderr
    assert "refused to create" in done.stderr
