"""Writers without one protection, for the controls of the campaigns: each must be detected."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pending import SaveSlot
from jaxckpt_train.store.backends import local, local_names
from jaxckpt_train.store.transaction import Transaction
from tests.nightly.faults.known_states import KEPT

PATIENCE_S = 0.25
PIECE = 8192


def _no_retries(patch: pytest.MonkeyPatch) -> None:
    for module in (local, local_names):
        patch.setattr(module, "retry_interrupted", lambda call, *args, **options: call(*args, **options))


def _writes_ignore(*codes: int) -> Callable[[pytest.MonkeyPatch], None]:
    def flaw(patch: pytest.MonkeyPatch) -> None:
        storage_errors = local._storage_errors

        @contextlib.contextmanager
        def suppressing(action: str, path: str) -> Any:
            with storage_errors(action, path):
                try:
                    yield
                except OSError as error:
                    if error.errno not in codes or not action.startswith(("write", "finish")):
                        raise

        patch.setattr(local, "_storage_errors", suppressing)

    return flaw


def _syncs_ignore_errors(patch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        sync = getattr(os, name)

        def ignoring(descriptor: int, sync: Callable[[int], None] = sync) -> None:
            with contextlib.suppress(OSError):
                sync(descriptor)

        patch.setattr(os, name, ignoring)


def _takes_short_for_whole(patch: pytest.MonkeyPatch) -> None:
    def once(self: Any, offset: int, data: np.ndarray) -> None:
        with local._storage_errors(f"write {len(data)} bytes at {offset}", self._path):
            os.pwrite(self._descriptor, memoryview(data), offset)

    patch.setattr(local._LocalSink, "write_at", once)


def _forgets_errors(patch: pytest.MonkeyPatch) -> None:
    settle = SaveSlot.settle

    def forgetting(self: SaveSlot, *arguments: Any, **options: Any) -> None:
        settle(self, *arguments, **options)

    patch.setattr(SaveSlot, "settle", forgetting)


def _gives_up_at_once(patch: pytest.MonkeyPatch) -> None:
    settle = SaveSlot.settle

    def impatient(self: SaveSlot, timeout_s: float | None = None, *arguments: Any, **options: Any) -> object:
        return settle(self, PATIENCE_S, *arguments, **options)

    patch.setattr(SaveSlot, "settle", impatient)


def _deletes_first(patch: pytest.MonkeyPatch) -> None:
    save = StepManager.save

    def deleting(self: StepManager, step: int, checkpointables: dict[str, Any], **options: Any) -> object:
        listed = self.steps
        if len(listed) >= KEPT:
            shutil.rmtree(self.path(listed[0]))
        return save(self, step, checkpointables, **options)

    patch.setattr(StepManager, "save", deleting)


def _publishes_late(patch: pytest.MonkeyPatch) -> None:
    """Publish each save only before the next one, or at the end, after it was acknowledged."""
    publish, close = Transaction._publish, StepManager.close
    late: list[tuple[Transaction, bool]] = []

    def publish_late() -> None:
        while late:
            publish(*late.pop())

    def one_behind(self: Transaction, replace: bool) -> None:
        publish_late()
        late.append((self, replace))

    def closing(self: StepManager, timeout_s: float | None = None) -> None:
        close(self, timeout_s)
        publish_late()

    patch.setattr(Transaction, "_publish", one_behind)
    patch.setattr(StepManager, "close", closing)


def _publishes_first(patch: pytest.MonkeyPatch) -> None:
    """Write the bytes of arrays last, in many calls, after the checkpoint has its final name."""
    write, publish = local._LocalSink.write_at, Transaction._publish
    late: list[tuple[str, int, bytes]] = []

    def later(self: Any, offset: int, data: np.ndarray) -> None:
        if self._path.endswith(".safetensors"):
            late.append((self._path, offset, bytes(data)))
        else:
            write(self, offset, data)

    def publish_first(self: Transaction, replace: bool) -> None:
        publish(self, replace)
        while late:
            path, offset, data = late.pop(0)
            for start in range(0, len(data), PIECE):
                with open(path.replace(self.directory, self.final), "r+b") as file:
                    file.seek(offset + start)
                    file.write(data[start : start + PIECE][: max(0, os.fstat(file.fileno()).st_size - offset - start)])

    patch.setattr(local._LocalSink, "write_at", later)
    patch.setattr(Transaction, "_publish", publish_first)


def _leaves_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "abort", lambda self: None)


def _removes_no_directory(patch: pytest.MonkeyPatch) -> None:
    remove = local.LocalBackend.remove

    def only_files(self: local.LocalBackend, path: str) -> None:
        if not os.path.isdir(path):
            remove(self, path)

    patch.setattr(local.LocalBackend, "remove", only_files)


def _raises_read_only_error_unwrapped(patch: pytest.MonkeyPatch) -> None:
    storage_errors = local._storage_errors

    @contextlib.contextmanager
    def foreign(action: str, path: str) -> Any:
        try:
            with storage_errors(action, path):
                yield
        except StorageError as error:
            if error.errno == errno.EROFS and isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise

    patch.setattr(local, "_storage_errors", foreign)


def _forgets_pins(patch: pytest.MonkeyPatch) -> None:
    def in_memory(self: StepManager, step: int, pinned: bool = True) -> None:
        self.own()

    patch.setattr(StepManager, "pin", in_memory)


_ANY: Collection[int] = errno.errorcode
FLAWS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no second try after a signal": _no_retries,
    "errors of writes are ignored": _writes_ignore(*_ANY),
    "a quota that is used up is ignored": _writes_ignore(errno.EDQUOT),
    "errors of syncs are ignored": _syncs_ignore_errors,
    "a short write is taken for a whole one": _takes_short_for_whole,
    "a save that failed is forgotten": _forgets_errors,
    "gives up at once": _gives_up_at_once,
    "deletes first": _deletes_first,
    "publishes late": _publishes_late,
    "publishes first": _publishes_first,
    "leaves attempts": _leaves_attempts,
    "removes no directory": _removes_no_directory,
    "raises the error of a read-only disk unwrapped": _raises_read_only_error_unwrapped,
    "pins in memory only": _forgets_pins,
}
