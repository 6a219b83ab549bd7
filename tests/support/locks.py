"""Locks of an owner: of other processes, with chosen times, and backends that interfere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend


def new_lock(directory: Path, backend: Any = None) -> OwnerLock:
    return OwnerLock(backend or LocalBackend(), str(directory))


def edit_owner(directory: Path, **process: Any) -> None:
    """Change the process that is recorded in the lock."""
    path = directory / LOCK_NAME
    record = json.loads(path.read_bytes())
    record["process"].update(process)
    path.write_text(json.dumps(record))


class Beats(LocalBackend):
    """A disk that reports these modification times of the lock one by one, and then always the last one."""

    def __init__(self, *modified_ns: int) -> None:
        self._modified_ns = list(modified_ns)

    def modified_ns(self, path: str) -> int:
        super().modified_ns(path)
        return self._modified_ns.pop(0) if len(self._modified_ns) > 1 else self._modified_ns[0]


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a lock over after 0.2 s of silence instead of a minute."""
    monkeypatch.setattr(lock_module, "POLL_S", 0.001)
    monkeypatch.setattr(lock_module, "SILENCE_S", 0.2)


class Between(LocalBackend):
    """Calls something right before and right after its first rename."""

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._before: Callable[[], object] | None = before
        self._after = after

    def rename(self, source: str, target: str) -> None:
        before, self._before = self._before, None
        if before is None:
            super().rename(source, target)
            return
        before()
        try:
            super().rename(source, target)
        finally:
            self._after()
