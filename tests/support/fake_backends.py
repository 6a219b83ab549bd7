"""Back ends on the real disk that hold, slow, refuse or record operations; and a callback on one of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train import manager
from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.local import LocalBackend


class HoldingBackend(LocalBackend):
    """Holds one kind of operation on matching paths until `go` is set.

    Args:
        operation: "rename", "remove", "create", "open", "list", "append" or "swap_record".
        part: text in the path; an operation on another path does not wait.
    """

    def __init__(self, operation: str, part: str) -> None:
        self._operation, self._part = operation, part
        self.go, self.reached = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def _pass(self, operation: str, path: str) -> None:
        if operation == self._operation and self._part in path:
            self.threads.append(threading.current_thread().name)
            self.reached.set()
            assert self.go.wait(60), f"{operation} {path} was never released"

    def create(self, path: str, *, direct: Any) -> Any:
        self._pass("create", path)
        return super().create(path, direct=direct)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        self._pass("open", f"{directory}/{name}")
        return super().open(directory, name, direct=direct)

    def list(self, path: str) -> Any:
        self._pass("list", path)
        return super().list(path)

    def append(self, path: str, data: bytes) -> None:
        self._pass("append", path)
        super().append(path, data)

    def rename(self, source: str, target: str) -> None:
        self._pass("rename", target)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._pass("remove", path)
        super().remove(path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        self._pass("swap_record", f"{path}: {data.decode()}")
        if is_url(path):
            self._pass("rename", data.decode())  # what publishes a step there
        return super().swap_record(path, data, version)


class SlowBackend(HoldingBackend):
    """Limits the rate of writes until `go` is set.

    Args:
        bytes_per_s: the rate; may be changed at any time.
        operation, part: the operations to hold, as for `HoldingBackend`; none by default.
    """

    def __init__(self, bytes_per_s: float, operation: str = "", part: str = "") -> None:
        super().__init__(operation, part)
        self.bytes_per_s = bytes_per_s
        self.written: set[str] = set()  # names of the attempts at steps

    def create(self, path: str, *, direct: Any) -> Any:
        self.written.update(each for each in path.split("/") if "step-" in each)
        return _SlowSink(self, super().create(path, direct=direct))


class _SlowSink:
    def __init__(self, backend: SlowBackend, inner: Any) -> None:
        self._backend, self._inner, self.in_order = backend, inner, inner.in_order
        self.alignment, self.finish, self.abandon = inner.alignment, inner.finish, inner.abandon

    def write_at(self, offset: int, data: Any) -> None:
        self._inner.write_at(offset, data)
        self._backend.go.wait(len(data) / self._backend.bytes_per_s)


class RefusingBackend(LocalBackend):
    """Refuses one kind of operation on matching paths, `times` times.

    Args:
        operation: "rename", "remove", "append", "create", "open" or "swap_record".
        part: text in the path.
        code: the errno.
        times: how often.
    """

    def __init__(self, operation: str, part: str, code: int, times: int) -> None:
        self._operation, self._part, self._code, self.times = operation, part, code, times

    def _refuse(self, operation: str, path: str) -> None:
        if operation == self._operation and self._part in path and self.times > 0:
            self.times -= 1
            raise StorageError(self._code, f"refused to {operation}", path)

    def create(self, path: str, *, direct: Any) -> Any:
        self._refuse("create", path)
        return super().create(path, direct=direct)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        self._refuse("open", f"{directory}/{name}")
        return super().open(directory, name, direct=direct)

    def append(self, path: str, data: bytes) -> None:
        self._refuse("append", path)
        super().append(path, data)

    def rename(self, source: str, target: str) -> None:
        self._refuse("rename", source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._refuse("remove", path)
        super().remove(path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        self._refuse("swap_record", path)
        if is_url(path):
            self._refuse("rename", data.decode())
        return super().swap_record(path, data, version)


class RecordingBackend(LocalBackend):
    """Records the changes of the disk, in order: (operation, name)."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def _note(self, operation: str, path: str) -> None:
        self.done.append((operation, path.rpartition("/")[2]))

    def sync(self, path: str) -> None:
        super().sync(path)
        self._note("sync", path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._note("rename", target)

    def remove(self, path: str) -> None:
        self._note("remove", path)
        super().remove(path)


class RecordingRun:
    """Replaces a run in tests of the deleter, and records the names that are deleted or refused."""

    def __init__(self) -> None:
        self.gone, self.kept = list[str](), list[str]()

    def plan_deletions(self) -> tuple[list[str], list[str]]:
        return [], []

    def synced(self, name: str, *, is_durable: bool) -> bool:
        return is_durable

    def deleted(self, name: str) -> None:
        self.gone.append(name)

    def not_deleted(self, names: Sequence[str]) -> None:
        self.kept += names


def callback_on(backend: LocalBackend, directory: Path | str, **options: Any) -> jct.CheckpointCallback:
    """Return a callback on this back end; the default save interval is 100 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "backend_for", lambda _: backend)
        return jct.CheckpointCallback(str(directory), **{"save_interval_steps": 100, **options})
