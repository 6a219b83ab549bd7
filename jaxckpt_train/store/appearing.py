"""A directory for other tools that appears under its name at once, when all that is in it is written."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator

from jaxckpt_train.errors import CheckpointExistsError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.attempt import Attempt
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.left_overs import remove_dead_exports
from jaxckpt_train.store.local import file_exists
from jaxckpt_train.store.transaction import begin_attempt

MOVE_IT_AWAY = "move it away, or choose another path"
"""What is to be done about a name that is taken, where nothing is ever replaced."""
_log = logging.getLogger("jaxckpt_train")


@contextlib.contextmanager
def appearing(backend: Backend, final: str, settings: StoreSettings, only_file: str | None = None) -> Iterator[Attempt]:
    """Within: a directory to write into; afterwards it has its name, or is gone if anything has failed.

    Args:
        backend: where.
        final: the absolute path that it is to have; nothing may be there.
        settings: how durable it is made.
        only_file: the name of the one file in it that gets the path `final` instead; None: the whole directory does.

    Raises:
        CheckpointExistsError: something is there.
        StorageError: the file system refused.
    """
    refuse_existing_name(final)
    parent = os.path.dirname(final)
    backend.make_directory(parent, parents=True, sync=settings.durability == "full")
    _remove_dead(backend, final)
    attempt = Attempt(backend, begin_attempt(backend, final), settings)
    try:
        yield attempt
        attempt.sync()
        _publish(backend, attempt.directory if only_file is None else f"{attempt.directory}/{only_file}", final)
    except BaseException as error:
        try:
            backend.remove(attempt.directory)
        except StorageError as second:
            error.add_note(f"and what was written of it, {attempt.directory}, could not be removed: {second}")
        raise
    if settings.durability == "full":
        backend.sync(parent)
    if only_file is not None:
        try:
            backend.remove(attempt.directory)
        except StorageError as error:
            _log.warning("%s: is written, but %s could not be removed: %s", final, attempt.directory, error)


def refuse_existing_name(final: str) -> None:
    """Raise CheckpointExistsError if anything has this name."""
    if file_exists(final):
        raise _exists(final)


def _remove_dead(backend: Backend, final: str) -> None:
    """Make room; what stays is no reason not to go on."""
    try:
        remove_dead_exports(backend, final)
    except StorageError as error:
        _log.warning("%s: what an earlier export left could not be removed: %s", final, error)


def _publish(backend: Backend, directory: str, final: str) -> None:
    try:
        backend.rename(directory, final)
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise _exists(final) from error


def _exists(final: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{final}: exists; {MOVE_IT_AWAY}")
