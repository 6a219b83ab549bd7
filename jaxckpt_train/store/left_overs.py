"""What processes that died in a save have left beside a checkpoint: found, and cleaned up."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.local import side_name
from jaxckpt_train.store.machine import is_dead_tag, is_tag_of_another_boot
from jaxckpt_train.store.manifest import COMMIT_NAME
from jaxckpt_train.store.removal import (
    first_strangers,
    keep,
    remove_left_over,
    remove_replaced,
    remove_without_commit,
    renamed,
)
from jaxckpt_train.store.strangers import listed
from jaxckpt_train.store.transaction import attempt_paths, is_committed

_ATTEMPT = re.compile(r"\.(?P<final>.+)\.tmp-(?P<tag>[0-9a-f]{8}-[0-9a-f]{8}-[0-9]+-[0-9]+)-[0-9]+", re.DOTALL)
_ASIDE = re.compile(r"\..+\.aside", re.DOTALL)


def is_left_over_name(name: str) -> bool:
    """Whether a save may make something of this name, and so later saves remove it."""
    return any(pattern.fullmatch(name) for pattern in (_ATTEMPT, _ASIDE))


def attempts(backend: Backend, parent: str) -> list[tuple[str, str]]:
    """The attempts below `parent`, dead or alive: their directories, and the names they would have got."""
    found = [(entry, _ATTEMPT.fullmatch(entry.name)) for entry in backend.list(parent) if entry.kind == "directory"]
    return [(f"{parent}/{entry.name}", match["final"]) for entry, match in found if match is not None]


def dead_attempts(backend: Backend, parent: str) -> list[str]:
    """The names of the attempts below `parent` whose processes ran on this machine, and are gone."""
    found = [(entry.name, _ATTEMPT.fullmatch(entry.name)) for entry in backend.list(parent)]
    return [name for name, match in found if match is not None and is_dead_tag(match["tag"])]


def remove_dead_attempts(backend: Backend, final: str) -> None:
    """Remove what attempts at this one checkpoint left whose processes ran on this machine and are gone.

    An exchange cut between its renames is taken back, or its older checkpoint removed if the newer is in place. That it
    is in place may be known to memory only: nothing is removed before the names are on the disk. An older checkpoint
    that holds anything else is kept, as `remove_replaced` does; what is none stays, if anything else is in it.

    Raises:
        StorageError: some of it could not be removed; the rest is.
    """
    parent, name = os.path.split(final)
    removals = list[Callable[[], None]]()
    entries = backend.list(parent)
    for entry in entries:
        path, tag = os.path.join(parent, entry.name), _dead_tag(entry, name)
        if tag is not None:
            may_be_torn = is_tag_of_another_boot(tag)
            removals.append(functools.partial(_remove_left, backend, entry, final, may_be_torn))
        elif path == side_name(final) and entry.kind != "file":  # an exchange moves directories, and links to them
            if is_committed(backend, final):
                removals.append(functools.partial(_remove_aside, backend, entry, final))
            elif is_committed(backend, path):
                if Entry(name, "directory") in entries and not first_strangers(backend, final):
                    remove_without_commit(backend, final)  # half of it is gone: a crash cut its replacement in place
                backend.rename(path, final)
    if removals:
        sync_directory(backend, parent)
    _do_all(removals)


def remove_dead_exports(backend: Backend, final: str) -> None:
    """Remove what exports of this name left whose processes ran on this machine and are gone: it is of any form.

    What has a COMMIT is an older checkpoint, which a save has replaced: it is for the next save to look at.

    Raises:
        StorageError: some of it could not be removed; the rest is.
    """
    parent, name = os.path.split(final)
    dead = [each for each in backend.list(parent) if each.kind == "directory" and _dead_tag(each, name) is not None]
    paths = [os.path.join(parent, each.name) for each in dead]
    no_steps = [path for path in paths if all(each.name != COMMIT_NAME for each in listed(backend, path))]
    _do_all([functools.partial(backend.remove, path) for path in no_steps])


def _dead_tag(entry: Entry, name: str) -> str | None:
    """The tag of the process that attempted to make `name` there, if it is surely gone."""
    match = _ATTEMPT.fullmatch(entry.name)
    is_of_the_dead = match is not None and match["final"] == name and is_dead_tag(match["tag"])
    return match["tag"] if match is not None and is_of_the_dead else None


def _do_all(removals: Sequence[Callable[[], None]]) -> None:
    """Do all of them; raises the first StorageError at the end."""
    refused = [error for remove in removals if (error := _refusal(remove))]
    if refused:
        raise refused[0]


def _refusal(remove: Callable[[], None]) -> StorageError | None:
    """Remove it; why that was refused, if it was: the others go all the same."""
    try:
        remove()
    except StorageError as error:
        return error
    return None


def _remove_left(backend: Backend, entry: Entry, final: str, may_be_torn: bool) -> None:
    path = os.path.join(os.path.dirname(final), entry.name)
    if entry.kind == "directory":
        remove_left_over(backend, path, final, may_be_torn=may_be_torn)
    else:
        remove_replaced(backend, path, final)


def _remove_aside(backend: Backend, entry: Entry, final: str) -> None:
    """Remove the older checkpoint of an exchange that was cut, and nothing else that has its side name.

    It gets the name of an attempt before it goes: half of it could not be told from nobody's under the side name.
    """
    aside = side_name(final)
    found = first_strangers(backend, aside) if entry.kind == "directory" else []
    is_checkpoint = is_committed(backend, aside)  # after the look, as another process may have moved it meanwhile
    if found and is_checkpoint:
        keep(backend, aside, final, found)
    elif not found and (is_checkpoint or entry.kind == "directory"):
        moved = renamed(backend, aside, attempt_paths(final))
        if moved is not None:
            sync_directory(backend, os.path.dirname(final))
            remove_replaced(backend, moved, final)
