"""Copies a checkpoint of ours: nothing gets its name that was not compared with the source first.

Where a copy goes: under the very name that was given, or into a directory with the name that the source has.

Compares a copy with what it was made of: by digests where they are of the same bytes, else by the bytes.

Removes what was moved: a step of a run by its owner, or a checkpoint of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt_train._validation import absolute_path
from jaxckpt_train.checkpoint import OURS, Opened
from jaxckpt_train.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DirectoryLockedError,
    NotACheckpointError,
    SettingsError,
)
from jaxckpt_train.inspection.diff import Wanted, over_pieces, pieces_of
from jaxckpt_train.inspection.runs import is_run, links_to_steps, newest_whole_step
from jaxckpt_train.run.annotations import Notes
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry, check_step, entry_from_manifest, parse_step_name, step_name
from jaxckpt_train.run.history import metrics_to_json
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.store.backends.base import Backend, sync_directory
from jaxckpt_train.store.backends.local import file_exists
from jaxckpt_train.store.backends.local_names import is_directory, is_same_file, real_path, remove_if_empty
from jaxckpt_train.store.committed import (
    Committed,
    attempt_paths,
    committed_identity,
    is_committed,
    open_committed,
    use_committed,
)
from jaxckpt_train.store.copy import CHUNK_BYTES, copy_checkpoint, same_digests
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME, ArrayRecord, PartRecord
from jaxckpt_train.store.removal import first_untracked_files, remove_replaced, rename_to_free
from jaxckpt_train.store.transaction import refuse_existing, refuse_temporary_name, remove_stale_temporaries
from jaxckpt_train.store.verify import first_damage

_OVERWRITE = "pass --overwrite"


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
    found = first_untracked_files(backend, path)
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
    hidden = rename_to_free(backend, path, attempt_paths(path))
    if hidden is not None:
        sync_directory(backend, os.path.dirname(path))
        remove_replaced(backend, hidden, path)


def refuse_another_content(source: Opened, copy: Opened) -> None:
    """Make sure that a copy holds what its source does.

    Raises:
        CorruptCheckpointError: it does not.
        StorageError: one of them cannot be read.
    """
    mine, theirs = source.committed.manifest.parts, copy.committed.manifest.parts
    if [part.name for part in mine] != [part.name for part in theirs]:
        raise _differs(copy, "its checkpointables")
    to_read: list[Wanted] = []
    for one, other in zip(mine, theirs, strict=True):
        if (one.kind, bytes(one.detail)) != (other.kind, bytes(other.detail)):
            raise _differs(copy, f"the tree of {one.name!r}")
        if one.files != other.files:
            raise _differs(copy, f"the files of {one.name!r}")
        to_read += _unsure(source, one, copy, other)
    for wanted, pair in over_pieces((source, copy), to_read):
        if not _same_bytes(*pair):
            raise _differs(copy, f"leaf {wanted.name!r}")


def _same_bytes(first: np.ndarray, second: np.ndarray) -> bool:
    return np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8))


def _unsure(source: Opened, one: PartRecord, copy: Opened, other: PartRecord) -> Iterator[Wanted]:
    """What has to be read: where the digests are not of the same bytes."""
    for array, copied in zip(one.arrays, other.arrays, strict=True):
        name = f"{one.name}/{array.name}"
        if _form(array) != _form(copied):
            raise _differs(copy, f"leaf {name!r}")
        manifests = source.committed.manifest, copy.committed.manifest
        itemsize = DTYPES[array.dtype].itemsize
        same = same_digests(manifests[0], array, manifests[1], copied, itemsize, CHUNK_BYTES)
        if same is None:
            yield from pieces_of(name, (array, copied))
        elif not same:
            raise _differs(copy, f"leaf {name!r}")


def _form(array: ArrayRecord) -> ArrayRecord:
    return msgspec.structs.replace(array, chunks=())


def _differs(copy: Opened, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{copy.path}: {what} came out otherwise than in the source; is the memory sound?")


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


def copy_checked(
    backend: Backend,
    source: Opened,
    final: str,
    *,
    replace: bool = False,
    every_byte: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Committed:
    """Copy an opened checkpoint.

    Every byte is compared with its digest as it is read, and the copy with the source before it gets its name.

    Args:
        backend: where.
        source: what is copied.
        final: the absolute path of the copy.
        replace: whether a checkpoint there is replaced.
        every_byte: whether all bytes of the copy are read again from the disk before it gets its name.
        progress: called with numbers of bytes as they are written, and as they are read again.

    Raises:
        CorruptCheckpointError: the source is damaged, or the copy differs; nothing of it is left.
        NotACheckpointError: the source is another tool's, without digests; or it was removed meanwhile.
        CheckpointExistsError: something has this name that is not to be replaced.
        StorageError: a file system refused.
    """
    refuse_other_tools(source)
    refuse_temporary_name(final)
    refuse_existing(backend, final, replace, _OVERWRITE)
    new_folders = list(_missing_folders(final))

    def copy(there: Committed) -> Committed:
        read = dataclasses.replace(source, committed=there)
        return copy_checkpoint(
            backend,
            there,
            backend,
            final,
            StoreSettings(digest=cast(DigestName, there.manifest.digest)),
            info=info_of_copy(backend, source.path, there),
            if_taken=f"{_OVERWRITE} to replace it, or choose another path",
            replace=replace,
            keep_chunks=True,
            check=lambda directory: _check(backend, read, directory, every_byte, progress),
            progress=progress,
        )

    try:
        if not new_folders:
            remove_stale_temporaries(backend, final)
        done = use_committed(backend, source.path, copy)
    except BaseException:
        for folder in new_folders:
            remove_if_empty(folder)
        raise
    if committed_identity(backend, final) != (final, done.manifest_sha256):
        raise CorruptCheckpointError(
            f"{final}: is not the copy that was committed there; does another process write to it?"
        )
    return done


def refuse_other_tools(source: Opened) -> None:
    """Raise NotACheckpointError if a copy of it could not be compared with digests."""
    if source.kind != OURS:
        raise NotACheckpointError(f"{source.path}: of {source.kind}, which keeps no digests to compare a copy with")


def _check(backend: Backend, source: Opened, directory: str, every_byte: bool, progress: Callable[[int], None]) -> None:
    """Compare what was written with the source, before it gets its name."""
    made = dataclasses.replace(source, committed=open_committed(backend, directory), run=None)
    refuse_another_content(source, made)
    damage = first_damage(backend, directory, progress) if every_byte else None
    if damage is not None:
        raise CorruptCheckpointError(f"{damage}; right after it was written: do not trust this disk further")


def _missing_folders(final: str) -> Iterator[str]:
    """The directories on the way to it that are made for it, the last one first."""
    folder = os.path.dirname(final)
    while not file_exists(folder):
        yield folder
        folder = os.path.dirname(folder)


def _noted_entry(backend: Backend, path: str, info: dict[str, Any]) -> Entry | None:
    """What the run of a step knows of it beside its manifest; None: it is no step, by its name."""
    run, name = os.path.split(path)
    parsed = parse_step_name(name)
    return None if parsed is None else Notes(backend, run).added_to(entry_from_manifest(name, *parsed, info))


def info_of_copy(backend: Backend, path: str, there: Committed) -> dict[str, Any]:
    """What the manifest of a copy says: what that of the source does, and the metrics that were attached since.

    Not how many notes its run has, which stay where they are; and a copy is not temporary, as somebody wants it.
    """
    info = dict(there.manifest.info)
    entry = _noted_entry(backend, path, info)
    if entry is not None and entry.metrics:
        info["metrics"] = {**metrics_to_json(entry.metrics)}
    if "notes" in info:
        info["notes"] = 0
    if info.get("temporary"):
        info["temporary"] = False
    return info
