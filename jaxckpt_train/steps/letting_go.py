"""Lets go of a run directory: the scrubber ends, deletions that were begun are finished, then the lock goes."""

from __future__ import annotations

import errno
import functools
import logging

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


def release(lock: OwnerLock, scrubber: Scrubber) -> None:
    """Give the lock back; a disk that refuses is told."""
    scrubber.join()  # it writes notes as the owner
    try:
        lock.release()
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:
            _log.warning("%s was not released: %s", lock.path, error)
