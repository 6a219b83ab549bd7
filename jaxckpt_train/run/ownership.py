"""What the owner of a run directory holds: the lock and the background workers, and how they are released."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.run.catalog import refuse_checkpoint
from jaxckpt_train.run.history import RunLog
from jaxckpt_train.run.lock import OwnerLock, try_to_write
from jaxckpt_train.run.retention import Deleter
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.store.backends.base import GONE, Backend, objects_of
from jaxckpt_train.store.backends.local import mount_warnings
from jaxckpt_train.store.timeouts import report_progress, time_limited

_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class Ownership:
    """The lock of a run directory and the background workers of its owner."""

    lock: OwnerLock
    deleter: Deleter
    scrubber: Scrubber
    log: RunLog


def release_later(held: Ownership) -> None:
    """Release the lock when pending deletions are finished. Returns without waiting for them or for the disk."""
    if not held.lock.is_inherited:
        held.scrubber.end()
        held.lock.end()
        held.deleter.end(functools.partial(release, held) if held.lock.may_be_held else None)


def finish_and_release(held: Ownership, timeout_s: float | None, until: Callable[[], bool] | None) -> None:
    """Finish pending deletions, then release the lock; after an interrupt or the timeout, a thread continues.

    In a forked child it does nothing: the child has neither the thread nor the lock.
    """
    if held.lock.is_inherited:
        return
    held.scrubber.end()
    is_done = False
    try:
        if not held.deleter.is_here:  # else garbage collection called this on the deleting thread
            is_done = held.deleter.close(functools.partial(release, held), timeout_s, until)
    finally:
        if not is_done:
            release_later(held)


def release(held: Ownership) -> None:
    """Release the lock; log a warning if the disk refuses."""
    held.scrubber.join()  # it writes notes as the owner
    if held.lock.is_own():  # else another process owns the run, and its history must not record an end
        held.log.ended()
    try:
        held.lock.release()
    except CheckpointError as error:
        if getattr(error, "errno", None) not in GONE:
            _log.warning("%s was not released: %s", held.lock.path, error)


@time_limited
def try_directory(backend: Backend, directory: str) -> None:
    """Check that a run can be kept in a directory. Raises SettingsError: it is one checkpoint; StorageError."""
    refuse_checkpoint(backend, directory)
    report_progress()
    if is_url(directory):
        objects_of(backend).probe(directory)
        return
    for doubt in mount_warnings(directory):
        _log.warning("%s: %s", directory, doubt)
    try_to_write(backend, directory)


class Beat:
    """What an owner does after each heartbeat. Holds no reference to the run, which may be dropped."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self.deleter: Deleter | None = None
        self._is_first = True

    def __call__(self) -> None:
        """Write the heartbeat of the log, and remove what is due."""
        self._log.beat()
        if self.deleter is not None:
            self.deleter.remove_due()
            if self._is_first:  # a resume does not wait for it
                self.deleter.look_back()
            self._is_first = False
