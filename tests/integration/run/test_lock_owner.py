"""The owner of a lock, as reported to other processes."""

from __future__ import annotations

from pathlib import Path

from jaxckpt_train.run.lock import SILENCE_S, OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend
from tests.conftest import RunPython


def lock_of(directory: Path) -> OwnerLock:
    return OwnerLock(LocalBackend(), str(directory))


def test_dead_local_process_is_known_at_once(tmp_path: Path, run_python: RunPython) -> None:
    program = "import os, sys, jaxckpt_train as jct; held = jct.StepManager(sys.argv[1]); held.own(); os._exit(0)"
    run_python(program, tmp_path, check=True)
    owner = lock_of(tmp_path).owner()
    assert owner is not None
    assert not owner.is_alive
    assert owner.silent_s < SILENCE_S
