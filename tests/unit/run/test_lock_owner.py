"""Who holds a lock, to somebody who only looks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from jaxckpt_train.run.lock import LOCK_NAME, SILENCE_S, OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend


def lock_of(directory: Path) -> OwnerLock:
    return OwnerLock(LocalBackend(), str(directory))


def test_nobody(tmp_path: Path) -> None:
    assert lock_of(tmp_path).owner() is None


def test_a_process_that_lives(tmp_path: Path) -> None:
    held = lock_of(tmp_path)
    held.acquire()
    owner = lock_of(tmp_path).owner()
    assert owner is not None
    assert owner.name.startswith(f"process {os.getpid()} on ")
    assert owner.is_alive
    assert -1 < owner.silent_s < SILENCE_S
    held.release()
    assert lock_of(tmp_path).owner() is None


@pytest.mark.parametrize("silent_s", [0.0, 2 * SILENCE_S])
@pytest.mark.parametrize("kind", ["of another machine", "damaged"])
def test_of_one_that_cannot_be_asked_heartbeat_tells(tmp_path: Path, kind: str, silent_s: float) -> None:
    process = {"host": "elsewhere", "pid": 7, "start": "1", "boot": "b", "namespace": "n"}
    content = json.dumps({"process": process, "token": "t"}) if kind != "damaged" else "{"
    (tmp_path / LOCK_NAME).write_text(content)
    heard = time.time() - silent_s
    os.utime(tmp_path / LOCK_NAME, (heard, heard))
    owner = lock_of(tmp_path).owner()
    assert owner is not None
    assert owner.is_alive == (silent_s == 0.0)
    assert owner.silent_s == pytest.approx(silent_s, abs=5)
    assert ("elsewhere" in owner.name) == (kind != "damaged")
    assert sorted(os.listdir(tmp_path)) == [LOCK_NAME]
