"""A back end that records every operation, and can die before one of them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Died(BaseException):
    """The simulated death of the process: nothing happens afterwards, not even cleanup."""


class RecordingBackend:
    """Forwards and records all operations of another back end, and dies before operation `dies_at`."""

    def __init__(self, inner: Any, dies_at: int | None = None) -> None:
        self.inner, self.dies_at = inner, dies_at
        self.operations: list[tuple[str, str]] = []

    def note(self, what: str, path: str) -> None:
        if self.dies_at is not None and len(self.operations) >= self.dies_at:
            raise Died(f"before {what} {path}")
        self.operations.append((what, path))

    def create(self, path: str, *, direct: Any) -> Any:
        self.note("create", path)
        return _RecordingSink(self, self.inner.create(path, direct=direct), path)

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        self.note("make_directory", path)
        self.inner.make_directory(path, parents=parents, sync=sync)

    def remove(self, path: str) -> None:
        self.note("remove", path)
        self.inner.remove(path)

    def sync(self, path: str) -> None:
        self.note("sync", path)
        self.inner.sync(path)

    def rename(self, source: str, target: str) -> None:
        self.note("rename", target)
        self.inner.rename(source, target)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        self.note("exchange", second)
        self.inner.exchange(first, second, sync=sync)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _RecordingSink:
    in_order = False

    def __init__(self, backend: RecordingBackend, inner: Any, path: str) -> None:
        self.backend, self.inner, self.path = backend, inner, path
        self.alignment = inner.alignment

    def write_at(self, offset: int, data: np.ndarray) -> None:
        self.backend.note("write", self.path)
        self.inner.write_at(offset, data)

    def finish(self, size: int, *, sync: bool) -> None:
        self.backend.note("finish synced" if sync else "finish", self.path)
        self.inner.finish(size, sync=sync)

    def abandon(self) -> None:
        self.inner.abandon()
