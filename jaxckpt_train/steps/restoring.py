"""Restores the newest step that is whole: a damaged one is skipped with a warning, and nothing is moved."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe
from jaxckpt_train.checkpointables.loading import load_parts
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError, free_frames
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.transaction import is_committed, open_committed
from jaxckpt_train.tree.restore import LoadOptions

# What a damaged or vanished file looks like. Anything else (no permission, no memory) is not the step's fault.
_DAMAGE = {
    errno.EIO,
    errno.ENOENT,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EBADMSG,
    errno.EUCLEAN,
}
_log = logging.getLogger("jaxckpt_train")


class StepVanishedError(Exception):
    """A step was deleted by its owner after it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ByteMeter:
    """Counts the bytes that a load reports, and passes them on."""

    def __init__(self, progress: Progress | None) -> None:
        self.bytes = 0
        self._progress, self._lock = progress, threading.Lock()

    def __call__(self, done: int) -> None:
        """Count some more."""
        with self._lock:
            self.bytes += done
        if self._progress is not None:
            self._progress(done)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore brought back, from which step, and past which damaged ones."""

    entry: Entry
    results: dict[str, Any]
    damaged: list[Entry]
    bytes: int
    restore_s: float

    def record(self) -> dict[str, Any]:
        """What the history says of it."""
        return {
            "step": self.entry.step,
            "name": self.entry.name,
            "bytes": self.bytes,
            "restore_s": self.restore_s,
            "bytes_per_s": round(self.bytes / self.restore_s),
            "skipped": [each.name for each in self.damaged] or None,
        }


def describe_listed(backend: Backend, directory: str, entry: Entry) -> CheckpointMetadata:
    """What a listed step holds.

    Raises:
        CorruptCheckpointError: its manifest is damaged.
        StepVanishedError: it is not there any more; look again.
    """
    try:
        return describe(open_committed(backend, f"{directory}/{entry.name}"))
    except (CorruptCheckpointError, NotACheckpointError) as error:
        if is_committed(backend, f"{directory}/{entry.name}"):
            raise
        raise StepVanishedError(entry.name) from error


def restore_newest(
    backend: Backend,
    directory: str,
    candidates: Sequence[Entry],
    targets: Mapping[str, Any] | None,
    settings: StoreSettings,
    progress: Progress | None,
) -> Restored:
    """Restore the first of the candidates that is whole.

    Args:
        backend: where.
        directory: the run directory.
        candidates: in the order in which they are tried; at least one.
        targets: by name of the checkpointable, None without targets: all of them.
        settings: how to read.
        progress: called with numbers of bytes.

    Raises:
        CorruptCheckpointError: none is whole.
        MismatchError: the first one that can be read does not fit the targets.
        StepVanishedError: one is not there any more; look again.
    """
    started, meter = time.perf_counter(), ByteMeter(progress)
    damaged: list[Entry] = []
    problems: list[str] = []
    last: Exception | None = None
    for entry in candidates:
        try:
            committed = open_committed(backend, f"{directory}/{entry.name}")
            wanted = {part.name: None for part in committed.manifest.parts} if targets is None else targets
            results = load_parts(backend, committed, wanted, settings, LoadOptions(), meter)
            return Restored(entry, results, damaged, meter.bytes, time.perf_counter() - started)
        except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _DAMAGE:
                raise
            if not is_committed(backend, f"{directory}/{entry.name}"):
                raise StepVanishedError(entry.name) from error
            damaged.append(entry)
            problems.append(str(error))
            last = error
            free_frames(error)  # all that was loaded until then, whose memory the next step needs
            _log.warning("step %d cannot be restored and is skipped: %s", entry.step, error)
    listing = "\n".join(f"  step {entry.step}: {text}" for entry, text in zip(damaged, problems, strict=True))
    raise CorruptCheckpointError(
        f"{directory}: none of {len(damaged)} committed steps can be restored; no file was changed:\n{listing}"
    ) from last
