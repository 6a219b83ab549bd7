"""Lets go of a run directory: the scrubber ends, deletions that were begun are finished, then the lock goes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.steps.retention import Deleter
from jaxckpt_train.steps.run_log import RunLog
from jaxckpt_train.steps.scrubber import Scrubber
from jaxckpt_train.store.backend import GONE

_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class Holding:
    """What this process holds of a run directory, and what works there in the background."""

    lock: OwnerLock
    deleter: Deleter
    scrubber: Scrubber
    log: RunLog


def let_go(held: Holding) -> None:
    """Let go once the deletions are done, without waiting for that, or for a disk that does not answer."""
    if not held.lock.is_inherited:
        held.scrubber.end()
        held.lock.end()
        held.deleter.end(functools.partial(release, held) if held.lock.may_be_held else None)


def finish(held: Holding, timeout_s: float | None, until: Callable[[], bool]) -> None:
    """Let go once the deletions are done, and wait for that; interrupted or late, without waiting any more.

    A forked child has none of it: neither the thread that deletes nor the lock.
    """
    if held.lock.is_inherited:
        return
    held.scrubber.end()
    is_done = False
    try:
        if not held.deleter.is_here:  # else called by garbage collection, in the middle of a deletion
            is_done = held.deleter.close(functools.partial(release, held), timeout_s, until)
    finally:
        if not is_done:
            let_go(held)


def release(held: Holding) -> None:
    """Give the lock back; a disk that refuses is told."""
    held.scrubber.join()  # it writes notes as the owner
    if held.lock.is_own():  # else the run is another's, whose history would say that it has ended
        held.log.ended()
    try:
        held.lock.release()
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) not in GONE:
            _log.warning("%s was not released: %s", held.lock.path, error)
