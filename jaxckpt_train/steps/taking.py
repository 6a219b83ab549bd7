"""Takes a run directory for this process: makes it, takes its lock, removes what dead owners left half done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps.interrupted import remove_attempts
from jaxckpt_train.steps.lock import OwnerLock, try_to_write
from jaxckpt_train.steps.refusals import refuse_checkpoint
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.file_system import doubts_about
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.machine import ProcessIdentity

_log = logging.getLogger("jaxckpt_train")


def take(backend: Backend, directory: str, lock: OwnerLock, took_over: Callable[[ProcessIdentity], object]) -> None:
    """Take a directory; `took_over` is told of a dead owner.

    Raises:
        SettingsError: there is a checkpoint, and no run.
        DirectoryLockedError, StorageError: a live process owns it, or the disk refuses.
        CheckpointTimeoutError: the disk has not answered for ten minutes.
    """

    def look(moved: Callable[[], None]) -> None:
        refuse_checkpoint(backend, directory)
        moved()
        for doubt in doubts_about(directory):
            _log.warning("%s: %s", directory, doubt)
        try_to_write(backend, directory)

    with contextlib.suppress(StorageError):  # which is told below: asked first where nobody waits for ever
        answer_of(directory, look)
    backend.make_directory(directory, parents=True, sync=True)
    dead = lock.acquire()
    if dead is not None:
        took_over(dead)
    lock.clean()
    sync_directory(backend, directory)  # names that a dead owner gave may be known to memory only
    remove_attempts(backend, directory)
