"""A run that this process owns for a while, to pin a step of it or to let some go; needs no JAX."""

from __future__ import annotations

import contextlib
import datetime
import errno
from collections.abc import Iterator

from jaxckpt_train.errors import NotACheckpointError, StorageError
from jaxckpt_train.steps.catalog import scan
from jaxckpt_train.steps.policy_context import PreservationPolicy
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend

PATIENCE_S = 7 * 86400.0  # for deletions: whoever does not want to wait interrupts


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@contextlib.contextmanager
def owned_run(backend: Backend, directory: str, policy: PreservationPolicy | None = None) -> Iterator[RunDirectory]:
    """Within: this process owns the run. Afterwards its deletions are done, and it is nobody's.

    Args:
        backend, directory: where the run is.
        policy: what `retain` keeps; None: all but temporary steps.

    Raises:
        NotACheckpointError: there is no run, and none is to be made.
        DirectoryLockedError, StorageError: a live process owns it, or the disk refuses.
        CheckpointTimeoutError: the disk has not answered for ten minutes.
    """
    if not answer_of(directory, lambda moved: scan(backend, directory)):
        raise NotACheckpointError(f"{directory}: expected a run, found no committed steps in it")
    run = RunDirectory(backend, directory, policy, _now)
    run.log.tends = True
    try:
        _own(run)
        yield run
    finally:
        run.close(PATIENCE_S)


def _own(run: RunDirectory) -> None:
    """Become its owner; a disk that has not a single block for that is told of with the way out."""
    try:
        run.own()
    except StorageError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        told = (
            f"{error.strerror}. Steps are deleted, or moved, by the owner of a run only, and there is no room to be "
            "that: remove the directory of the oldest step by hand, while no job runs, and try it again"
        )
        raise StorageError(error.errno, told, error.filename) from error
