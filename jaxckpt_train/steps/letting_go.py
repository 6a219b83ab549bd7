"""Lets go of a run directory: the scrubber ends, deletions that were begun are finished, then the lock goes."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.steps.retention import Deleter
from jaxckpt_train.steps.scrubber import Scrubber

_log = logging.getLogger("jaxckpt_train")


def let_go(lock: OwnerLock, deleter: Deleter, scrubber: Scrubber) -> None:
    """Let go once the deletions are done, without waiting for that, or for a disk that does not answer."""
    if not lock.is_inherited:
        scrubber.end()
        lock.end()
        deleter.end(functools.partial(release, lock, scrubber) if lock.may_be_held else None)


def finish(
    lock: OwnerLock, deleter: Deleter, scrubber: Scrubber, timeout_s: float | None, until: Callable[[], bool]
) -> None:
    """Let go once the deletions are done, and wait for that; interrupted or late, without waiting any more.

    A forked child has none of it: neither the thread that deletes nor the lock.
    """
    if lock.is_inherited:
        return
    scrubber.end()
    is_done = False
    try:
        if not deleter.is_here:  # else called by garbage collection, in the middle of a deletion
            is_done = deleter.close(functools.partial(release, lock, scrubber), timeout_s, until)
    finally:
        if not is_done:
            let_go(lock, deleter, scrubber)


def release(lock: OwnerLock, scrubber: Scrubber) -> None:
    """Give the lock back; a disk that refuses is told."""
    scrubber.join()  # it writes notes as the owner
    try:
        lock.release()
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:
            _log.warning("%s was not released: %s", lock.path, error)
