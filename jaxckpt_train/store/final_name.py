"""Whether a checkpoint may get a name: what has it already, and what dead saves have left beside it."""

from __future__ import annotations

import errno
import itertools
import logging
import os

from jaxckpt_train.errors import CheckpointExistsError, SettingsError, StorageError
from jaxckpt_train.store.backend import GONE, Backend
from jaxckpt_train.store.left_overs import is_left_over_name, remove_dead_attempts
from jaxckpt_train.store.local import file_exists, side_name
from jaxckpt_train.store.replaced import LOOKS
from jaxckpt_train.store.strangers import MOST_TOLD, strangers
from jaxckpt_train.store.transaction import is_committed

_log = logging.getLogger("jaxckpt_train")


def refuse_left_over_name(final: str) -> None:
    """Raise SettingsError if later saves would clean up what has this name."""
    if is_left_over_name(os.path.basename(final)):
        raise SettingsError(
            f"path: {final}: expected a name that no unfinished save may have: later saves clean up `.NAME.aside` and "
            "`.NAME.tmp-...`; choose another one"
        )


def refuse_existing(backend: Backend, final: str, replace: bool, how: str = "pass overwrite=True") -> None:
    """Raise CheckpointExistsError unless nothing has this name, or a checkpoint alone that is to be replaced.

    Args:
        backend: where.
        final: the name.
        replace: whether it is.
        how: what to do to have it replaced.
    """
    if not file_exists(final):
        return
    # One look may meet what another process has just replaced, and is removing: the next one sees the new.
    # What is half removed is a checkpoint if a crash cut its replacement in place: the new one has the side name then.
    names = (final, side_name(final))
    if not any(any(is_committed(backend, name) for name in names) or not file_exists(final) for _ in range(LOOKS)):
        raise CheckpointExistsError(f"{final}: exists and is no checkpoint; it is not replaced. Choose another path")
    if not replace:
        raise CheckpointExistsError(f"{final}: exists; {how} to replace it, or choose another path")
    for _ in range(LOOKS):
        others = list(itertools.islice(strangers(backend, final, certain=False), MOST_TOLD))
        if not others:
            return
    raise CheckpointExistsError(
        f"{final}: expected nothing but a checkpoint to replace, found also {', '.join(others)}; move that away, or "
        "choose another path"
    )


def remove_left_overs(backend: Backend, final: str) -> None:
    """Make room; left-overs that stay are no reason not to save. Where there is no directory there are none."""
    try:
        remove_dead_attempts(backend, final)
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            return
        _log.warning("%s: what an earlier attempt left could not be removed: %s", final, error)
