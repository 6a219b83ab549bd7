"""Removes what was moved: a step of a run by its owner, or a checkpoint of its own."""

from __future__ import annotations

import os

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.looking.run_links import links_to_steps
from jaxckpt_train.looking.whole_steps import newest_whole_step
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.removal import first_strangers, remove_replaced, renamed
from jaxckpt_train.store.transaction import attempt_paths


def refuse_to_remove_step(backend: Backend, owned: RunDirectory, directory: str, name: str) -> None:
    """Raise SettingsError if a step must stay in its run: pinned, newest, newest whole, or what a link stands for.

    Args:
        backend: where.
        owned: the run, which this process owns.
        directory: of the run.
        name: of the step's directory.

    Raises:
        SettingsError: it must stay.
        StorageError: the disk does not tell of a newer step whether it is whole: it may be this one that has to stay.
    """
    newest, left = owned.newest(), owned.left()
    line = [entry for entry in newest if entry.name not in left]
    found = newest_whole_step(backend, directory, line, every_byte=False)
    whole = found.entry
    staying = {step: f"what the link {link!r} stands for" for step, link in links_to_steps(backend, directory).items()}
    staying |= {entry.name: "a pinned one" for entry in [*owned.entries(), *owned.damaged()] if entry.pinned}
    staying |= {whole.name: "the newest one that is whole"} if whole is not None else {}
    if line:
        staying |= {max(line, key=lambda entry: entry.step).name: "the highest one", line[-1].name: "the newest one"}
    if name in staying:
        raise SettingsError(
            f"{directory}/{name}: is {staying[name]}, and stays in its run; copy it by `jaxckpt cp` instead"
        )
    for refusal in found.refused.values():
        raise refusal


def remove_step(owned: RunDirectory, name: str) -> None:
    """Have the owner of a run delete a step, soon: it is gone when the run is let go of."""
    owned.held.deleter.delete([name])


def refuse_to_remove_checkpoint(backend: Backend, path: str) -> None:
    """Raise SettingsError if more would go than a checkpoint, or another one: it is a link, or something else is in it.

    Raises:
        StorageError: the disk does not tell.
    """
    folder, name = os.path.split(path)
    kinds = {entry.name: entry.kind for entry in backend.list(folder)}
    if kinds.get(name) != "directory":
        raise SettingsError(f"{path}: expected the directory of a checkpoint to move, found a link to one; move that")
    found = first_strangers(backend, path)
    if found:
        raise SettingsError(
            f"{path}: expected nothing but a checkpoint to move, found also {', '.join(found)}; move that away first, "
            "or copy the checkpoint by `jaxckpt cp`"
        )


def remove_checkpoint(backend: Backend, path: str) -> None:
    """Remove a checkpoint; it is hidden first, so that half of it is never taken for one.

    Raises:
        StorageError: the file system refused; it may be there under a hidden name, which later saves clean up.
    """
    hidden = renamed(backend, path, attempt_paths(path))
    if hidden is not None:
        sync_directory(backend, os.path.dirname(path))
        remove_replaced(backend, hidden, path)
