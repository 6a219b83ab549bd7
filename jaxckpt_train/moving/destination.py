"""Where a copy goes: under the very name that was given, or into a directory with the name that the source has."""

from __future__ import annotations

import os

from jaxckpt_train.errors import CheckpointExistsError, DirectoryLockedError, SettingsError
from jaxckpt_train.looking.run_look import is_run
from jaxckpt_train.opened import Opened
from jaxckpt_train.steps.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.steps.step_names import check_step, parse_step_name, step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.local import file_exists
from jaxckpt_train.store.local_names import is_directory, is_same_file, real_path
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.store.transaction import is_committed
from jaxckpt_train.value_checks import absolute_path


def destination(backend: Backend, given: str, source: Opened) -> str:
    """The absolute path that a copy gets.

    Args:
        backend: where.
        given: as the user gave it; in a run, and in what ends with "/" or is "." or "..", the copy keeps its name.
        source: what is copied.

    Raises:
        CheckpointExistsError: a directory has the name, and is no checkpoint.
        SettingsError: the path cannot be that of a copy of this source, or lies within a checkpoint.
        DirectoryLockedError: it is in a run that a live process owns, which would not know of it.
        StorageError: the disk does not tell.
    """
    path = absolute_path("destination", given)
    is_in_run = is_run(backend, path)
    final = path
    if os.path.basename(given) in ("", ".", "..") or is_in_run:
        if is_committed(backend, path):
            raise SettingsError(f"{path}: is a checkpoint, and nothing is put into one; to replace it, leave out the /")
        final = f"{path}/{_name_of(source, is_in_run, path)}"
    elif is_directory(path) and not is_committed(backend, path):
        raise CheckpointExistsError(f"{path}: exists and is no checkpoint; to put the copy into it, add a / at the end")
    _refuse_within(source.path, final)
    refuse_place(backend, final)
    return final


def _name_of(source: Opened, is_in_run: bool, path: str) -> str:
    """The name of the source's own directory; in a run that of its step."""
    name, step = os.path.basename(source.path), source.committed.manifest.info.get("step")
    if not is_in_run or parse_step_name(name) is not None:
        return name
    if not isinstance(step, int):
        raise SettingsError(
            f"{path}: is a run, and {source.path} does not say which step it is; give the whole name that it is to "
            f"have there, such as {path}/{step_name(100)}"
        )
    return step_name(check_step(step))


def _refuse_within(source: str, final: str) -> None:
    if final == source or (file_exists(final) and is_same_file(source, final)):
        raise SettingsError(f"{final}: expected another place than that of the source, found the same")
    if f"{real_path(final)}/".startswith(f"{real_path(source)}/"):
        raise SettingsError(f"{final}: expected a place outside of the source, found one within {source}")


def refuse_place(backend: Backend, final: str) -> None:
    """Refuse a path at which nothing new may appear, whatever it is.

    Raises:
        SettingsError: it lies within a checkpoint.
        DirectoryLockedError: it is in a run that a live process owns.
    """
    refuse_within_checkpoint(final)
    _refuse_owned(backend, os.path.dirname(final))


def refuse_within_checkpoint(final: str) -> None:
    """Raise SettingsError if a path lies, also by links, in a directory that is a checkpoint of ours, or below one."""
    folder = real_path(os.path.dirname(final))
    while folder != os.path.dirname(folder):
        if file_exists(f"{folder}/{COMMIT_NAME}") and file_exists(f"{folder}/{MANIFEST_NAME}"):
            raise SettingsError(
                f"{final}: expected a place outside of any checkpoint, found one within {folder}, with which it would "
                "be deleted; choose another"
            )
        folder = os.path.dirname(folder)


def _refuse_owned(backend: Backend, folder: str) -> None:
    owner = OwnerLock(backend, folder).owner(watches=True) if file_exists(f"{folder}/{LOCK_NAME}") else None
    if owner is not None and owner.is_alive:
        raise DirectoryLockedError(
            f"{folder}: owned by {owner.name}, which would not know of a step that is put there: stop it first, or "
            "choose another directory"
        )
