"""Copies and moves checkpoints of this library. A copy is compared with its source before it gets its final name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt_train._validation import absolute_path
from jaxckpt_train.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DirectoryLockedError,
    NotACheckpointError,
    SettingsError,
)
from jaxckpt_train.inspection.diff import Wanted, over_pieces, pieces_of
from jaxckpt_train.inspection.runs import (
    check_newest,
    inspect_run,
    is_run,
    links_to_steps,
    newer_broken,
    newest_whole,
)
from jaxckpt_train.opened import OURS, Opened
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import check_step, entry_from_manifest, parse_step_name, step_name
from jaxckpt_train.run.history import metrics_to_json
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.store.backends.base import Backend, sync_directory
from jaxckpt_train.store.backends.local import file_exists
from jaxckpt_train.store.backends.local_names import is_directory, is_same_file, real_path
from jaxckpt_train.store.committed import Committed, attempt_paths, is_committed, open_committed, use_committed
from jaxckpt_train.store.copy import CHUNK_BYTES, copy_checkpoint, same_digests
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.store.removal import first_untracked_files, remove_replaced, rename_to_free
from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.store.transaction import refuse_existing, refuse_temporary_name, remove_stale_temporaries
from jaxckpt_train.store.verify import first_damage

_OVERWRITE = "pass --overwrite"


def copy_checked(
    backend: Backend,
    source: Opened,
    final: str,
    *,
    replace: bool = False,
    every_byte: bool = False,
    progress: Callable[[int], None],
) -> Committed:
    """Copy an opened checkpoint.

    Every byte is compared with its digest when it is read, and the copy with its source before it gets its final name.
    """
    refuse_other_tools(source)
    refuse_temporary_name(final)
    refuse_existing(backend, final, replace, _OVERWRITE)

    def copy(committed: Committed) -> Committed:
        read = dataclasses.replace(source, committed=committed)

        def check(directory: str) -> None:
            made = dataclasses.replace(read, committed=open_committed(backend, directory), run=None)
            _refuse_different_content(read, made)
            damage = first_damage(backend, directory, progress) if every_byte else None
            if damage is not None:
                raise CorruptCheckpointError(f"{damage}; this is a new copy, so do not trust this disk")

        return copy_checkpoint(
            backend,
            committed,
            backend,
            final,
            StoreSettings(digest=cast(DigestName, committed.manifest.digest)),
            info=_info_of_copy(backend, source.path, committed),
            if_taken=f"{_OVERWRITE} to replace it, or choose another path",
            replace=replace,
            keep_chunks=True,
            check=check,
            progress=progress,
        )

    remove_stale_temporaries(backend, final)
    return use_committed(backend, source.path, copy)


def refuse_other_tools(source: Opened) -> None:
    """Raise NotACheckpointError if a checkpoint has no digests."""
    if source.kind != OURS:
        raise NotACheckpointError(
            f"{source.path}: expected a checkpoint with digests, found one of {source.kind}, which stores none"
        )


def _info_of_copy(backend: Backend, path: str, committed: Committed) -> dict[str, Any]:
    """Return the `info` of a copy: that of the source with metrics that were attached later, but never temporary."""
    info = dict(committed.manifest.info)
    run, name = os.path.split(path)
    parsed = parse_step_name(name)
    if parsed is not None:
        entry = FoundRecord(backend, run).applied_to(entry_from_manifest(name, *parsed, info))
        if entry.metrics:
            info["metrics"] = {**metrics_to_json(entry.metrics)}
    if info.keys() & {"record", "notes"}:
        info.pop("notes", None)  # the name of this field in earlier versions
        info["record"] = 0
    return info | ({"temporary": False} if info.get("temporary") else {})


def destination(backend: Backend, given: str, source: Opened) -> str:
    """Return the absolute path of a copy. It keeps the name of its source in a run, and if `given` ends with a /."""
    path = absolute_path("destination", given)
    is_in_run = is_run(backend, path)
    final = path
    if os.path.basename(given) in ("", ".", "..") or is_in_run:
        if is_committed(backend, path):
            raise SettingsError(
                f"{path}: expected a directory without a checkpoint, found one; to replace it, omit the / at the end"
            )
        final = f"{path}/{_name_of(source, is_in_run, path)}"
    elif is_directory(path) and not is_committed(backend, path):
        raise CheckpointExistsError(
            f"{path}: expected no such directory, or a checkpoint; to put the copy into it, add a / at the end"
        )
    if file_exists(final) and is_same_file(source.path, final):
        raise SettingsError(f"{final}: expected a path different from the source, found the same")
    if f"{real_path(final)}/".startswith(f"{real_path(source.path)}/"):
        raise SettingsError(f"{final}: expected a path outside of the source, found one inside {source.path}")
    refuse_destination(backend, final)
    return final


def _name_of(source: Opened, is_in_run: bool, path: str) -> str:
    """Return the name of the source's directory. In a run, it is the name of the step."""
    name, step = os.path.basename(source.path), source.committed.manifest.info.get("step")
    if not is_in_run or parse_step_name(name) is not None:
        return name
    if not isinstance(step, int):
        raise SettingsError(
            f"{path}: is a run, but {source.path} does not record its step; pass the complete path of the copy, such "
            f"as {path}/{step_name(100)}"
        )
    return step_name(check_step(step))


def refuse_destination(backend: Backend, final: str) -> None:
    """Refuse a path where nothing new may be written."""
    refuse_within_checkpoint(final)
    folder = os.path.dirname(final)
    owner = OwnerLock(backend, folder).owner(watches=True) if file_exists(f"{folder}/{LOCK_NAME}") else None
    if owner is not None and owner.is_alive:
        raise DirectoryLockedError(
            f"{folder}: owned by {owner.name}, which would not see a new step; stop that process first, or choose "
            "another directory"
        )


def refuse_within_checkpoint(final: str) -> None:
    """Raise SettingsError if a path is inside a checkpoint of this library, directly or through links."""
    folder = real_path(os.path.dirname(final))
    while folder != os.path.dirname(folder):
        if file_exists(f"{folder}/{COMMIT_NAME}") and file_exists(f"{folder}/{MANIFEST_NAME}"):
            raise SettingsError(
                f"{final}: expected a path outside of any checkpoint, found one inside {folder}, which would be "
                "deleted together with it; choose another path"
            )
        folder = os.path.dirname(folder)


def _refuse_different_content(source: Opened, copy: Opened) -> None:
    mine, theirs = source.committed.manifest, copy.committed.manifest
    if [part.name for part in mine.parts] != [part.name for part in theirs.parts]:
        raise _difference_error(copy, "its checkpointables")
    to_read: list[Wanted] = []  # where the digests of source and copy do not cover the same bytes
    for one, other in zip(mine.parts, theirs.parts, strict=True):
        if (one.kind, bytes(one.detail)) != (other.kind, bytes(other.detail)):
            raise _difference_error(copy, f"the tree of {one.name!r}")
        if one.files != other.files:
            raise _difference_error(copy, f"the files of {one.name!r}")
        for array, copied in zip(one.arrays, other.arrays, strict=True):
            name, itemsize = f"{one.name}/{array.name}", DTYPES[array.dtype].itemsize
            same = same_digests(mine, array, theirs, copied, itemsize, CHUNK_BYTES)
            if same is False or msgspec.structs.replace(array, chunks=copied.chunks) != copied:
                raise _difference_error(copy, f"leaf {name!r}")
            if same is None:
                to_read += pieces_of(name, (array, copied))
    for wanted, (first, second) in over_pieces((source, copy), to_read):
        if not np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)):
            raise _difference_error(copy, f"leaf {wanted.name!r}")


def _difference_error(copy: Opened, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{copy.path}: expected {what} of the source, found a difference; check the memory")


def refuse_to_remove_step(backend: Backend, owned: RunDirectory, directory: str, name: str) -> None:
    """Refuse to remove a step that must stay in its run, which this process owns."""
    newest, left = owned.newest(), owned.left()
    line = [entry for entry in newest if entry.name not in left]
    statuses = check_newest(backend, directory, inspect_run(backend, directory), every_byte=False)
    whole = newest_whole(statuses)
    staying = {step: f"the target of the link {link!r}" for step, link in links_to_steps(backend, directory).items()}
    staying |= {entry.name: "a pinned step" for entry in [*owned.entries(), *owned.damaged()] if entry.pinned}
    staying |= {whole.name: "the newest valid step"} if whole is not None else {}
    if line:
        staying |= {max(line, key=lambda entry: entry.step).name: "the highest step", line[-1].name: "the newest step"}
    if name in staying:
        raise SettingsError(
            f"{directory}/{name}: cannot be moved, because it is {staying[name]}; copy it with `jaxckpt cp` instead"
        )
    for status in newer_broken(statuses, whole):
        if status.refusal is not None:
            raise status.refusal


def refuse_to_remove_checkpoint(backend: Backend, path: str) -> None:
    """Refuse to remove a path that is a link, or a directory with more than a checkpoint in it."""
    folder, name = os.path.split(path)
    kinds = {entry.name: entry.kind for entry in backend.list(folder)}
    if kinds.get(name) != "directory":
        raise SettingsError(
            f"{path}: expected the directory of a checkpoint to move, found a link; move the directory that it leads to"
        )
    found = first_untracked_files(backend, path)
    if found:
        raise SettingsError(
            f"{path}: expected only a checkpoint to move, found also {', '.join(found)}; move these files away first, "
            "or copy the checkpoint with `jaxckpt cp`"
        )


def remove_checkpoint(backend: Backend, path: str) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one is never taken for a checkpoint."""
    hidden = rename_to_free(backend, path, attempt_paths(path))
    if hidden is not None:
        sync_directory(backend, os.path.dirname(path))
        remove_replaced(backend, hidden, path)
