"""The owner of a lock, as reported to other processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from jaxckpt_train.run.lock import LOCK_NAME, SILENCE_S, OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import lock_file, replace_lock


def lock_of(directory: Path) -> OwnerLock:
    return OwnerLock(LocalBackend(), str(directory))


def test_free_lock_has_no_owner(tmp_path: Path) -> None:
    assert lock_of(tmp_path).owner() is None


def test_live_owner_is_reported(tmp_path: Path) -> None:
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
def test_heartbeat_shows_whether_unknown_owner_lives(tmp_path: Path, kind: str, silent_s: float) -> None:
    process = {"host": "elsewhere", "pid": 7, "start": "1", "boot": "b", "namespace": "n"}
    content = json.dumps({"process": process, "token": "t"}) if kind != "damaged" else "{"
    replace_lock(tmp_path, content.encode())
    heard = time.time() - silent_s
    os.utime(lock_file(tmp_path), (heard, heard))
    owner = lock_of(tmp_path).owner()
    assert owner is not None
    assert owner.is_alive == (silent_s == 0.0)
    assert owner.silent_s == pytest.approx(silent_s, abs=5)
    assert ("elsewhere" in owner.name) == (kind != "damaged")
    assert sorted(os.listdir(tmp_path)) == [LOCK_NAME]
