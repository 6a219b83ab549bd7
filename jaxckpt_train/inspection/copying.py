"""Copies and moves checkpoints of this library. A copy has the same files as its source."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

import msgspec

from jaxckpt_train._validation import absolute_path, is_url
from jaxckpt_train.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DirectoryLockedError,
    NotACheckpointError,
    SettingsError,
    StorageError,
)
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
from jaxckpt_train.run.maintenance import owned_run
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.store.backends.base import Backend, sync_directory
from jaxckpt_train.store.backends.local_names import is_directory, is_same_file, real_path
from jaxckpt_train.store.committed import (
    Committed,
    attempt_paths,
    committed_identity,
    folders_of,
    is_committed,
    is_data_folder,
    use_committed,
)
from jaxckpt_train.store.files import file_exists
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.store.removal import (
    first_untracked_files,
    refuse_reserved_name,
    remove_replaced,
    remove_stale_temporaries,
    rename_to_free,
)
from jaxckpt_train.store.transaction import begin, refuse_existing
from jaxckpt_train.store.verify import copy_verified, first_damage

_OVERWRITE = "pass --overwrite"
_SLASHES_OF_BUCKET = 2  # in s3://bucket
_IF_TAKEN = f"{_OVERWRITE} to replace it, or choose another path"


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

    Every byte is compared with its digest on the way, and with `every_byte` read again from the copy. After that the
    copy gets its final name. In a run on an object store, that is a new name for the step, which its record has then.
    """
    refuse_other_tools(source)
    run, name = os.path.split(final)
    parsed = parse_step_name(name) if is_url(final) else None
    if parsed is not None:
        with owned_run(backend, run, may_be_new=True) as owned:
            same = [each.name for each in [*owned.entries(), *owned.damaged()] if each.step == parsed[0]]
            if same and not replace:
                raise CheckpointExistsError(f"{run}: has step {parsed[0]} already; {_IF_TAKEN}")
            copy = _Copy(backend, source, f"{run}/{owned.next_step_name(parsed[0])}", every_byte, progress, run=owned)
            done = use_committed(backend, source.location, copy)
            owned.held.deleter.delete(same)
            return done
    refuse_reserved_name(final)
    refuse_existing(backend, final, replace, _OVERWRITE)
    remove_stale_temporaries(backend, final)
    return use_committed(backend, source.location, _Copy(backend, source, final, every_byte, progress, replace=replace))


@dataclasses.dataclass(frozen=True)
class _Copy:
    """Makes a copy of what `use_committed` has opened; with `run`, as a step of this run on an object store."""

    backend: Backend
    source: Opened
    final: str
    every_byte: bool
    progress: Callable[[int], None]
    run: RunDirectory | None = None
    replace: bool = False

    def __call__(self, committed: Committed) -> Committed:
        info = _info_of_copy(self.backend, self.source.path, committed)
        settings, publish = self.source.settings, None
        if self.run is not None:
            publish = functools.partial(self.run.publish, os.path.basename(self.final), info)
        transaction = begin(self.backend, self.final, settings, publish, is_step=self.run is not None)
        try:
            transaction.add_folders(folders_of(committed.manifest))
            copy_verified(self.backend, committed, transaction, settings, self.progress)
            done = transaction.complete(msgspec.structs.replace(committed.manifest, info=info))
            damage = first_damage(self.backend, transaction.directory, self.progress) if self.every_byte else None
            if damage is not None:
                place = "storage" if is_url(self.final) else "disk"
                raise CorruptCheckpointError(f"{damage}; this is a new copy, so do not trust this {place}")
            transaction.publish(replace=self.replace, if_taken=_IF_TAKEN)
        except BaseException as error:
            transaction.abort_after(error)
            raise
        return done


def refuse_other_tools(source: Opened) -> None:
    """Raise NotACheckpointError if a checkpoint has no digests."""
    if source.kind != OURS:
        raise NotACheckpointError(
            f"{source.location}: expected a checkpoint with digests, found one of {source.kind}, which stores none"
        )


def _info_of_copy(backend: Backend, path: str, committed: Committed) -> dict[str, Any]:
    """Return the `info` of a copy: that of the source with metrics that were attached later, but never temporary."""
    info = dict(committed.manifest.info)
    info.pop("taken_bytes", None)  # a copy shares no file
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
    elif not is_url(path) and is_directory(path) and not is_committed(backend, path):
        raise CheckpointExistsError(
            f"{path}: expected no such directory, or a checkpoint; to put the copy into it, add a / at the end"
        )
    if (is_url(final) or file_exists(backend, final)) and is_same_file(source.location, final):
        raise SettingsError(f"{final}: expected a path different from the source, found the same")
    if f"{real_path(final)}/".startswith(f"{real_path(source.location)}/"):
        raise SettingsError(f"{final}: expected a path outside of the source, found one inside {source.location}")
    refuse_destination(backend, final)
    return final


def _name_of(source: Opened, is_in_run: bool, path: str) -> str:
    """Return the name of the source's directory. In a run, it is the name of the step, without a token."""
    name, step = os.path.basename(source.location), source.committed.manifest.info.get("step")
    if (parsed := parse_step_name(name)) is not None:
        return step_name(*parsed)
    if not is_in_run:
        return name
    if not isinstance(step, int):
        raise SettingsError(
            f"{path}: is a run, but {source.location} does not record its step; pass the complete path of the copy, "
            f"such as {path}/{step_name(100)}"
        )
    return step_name(check_step(step))


def refuse_destination(backend: Backend, final: str) -> None:
    """Refuse a path where nothing new may be written."""
    refuse_within_checkpoint(backend, final)
    folder = os.path.dirname(final)
    if is_url(folder):  # where a new step needs the ownership of its run, and other names are no part of it
        return
    owner = OwnerLock(backend, folder).owner(watches=True) if file_exists(backend, f"{folder}/{LOCK_NAME}") else None
    if owner is not None and owner.is_alive:
        raise DirectoryLockedError(
            f"{folder}: owned by {owner.name}, which would not see a new step; stop that process first, or choose "
            "another directory"
        )


def refuse_within_checkpoint(backend: Backend, final: str) -> None:
    """Raise SettingsError if a path is inside a checkpoint of this library, directly or through links."""
    is_remote = is_url(final)
    folder = real_path(os.path.dirname(final))
    while folder.count("/") > _SLASHES_OF_BUCKET if is_remote else folder != os.path.dirname(folder):
        if file_exists(backend, f"{folder}/{COMMIT_NAME}") and (
            is_remote or file_exists(backend, f"{folder}/{MANIFEST_NAME}")
        ):
            raise SettingsError(
                f"{final}: expected a path outside of any checkpoint, found one inside {folder}, which would be "
                "deleted together with it; choose another path"
            )
        folder = os.path.dirname(folder)


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


def refuse_to_remove_checkpoint(backend: Backend, source: Opened) -> None:
    """Refuse to remove a path that is a link, or a directory with more than a checkpoint in it."""
    path = source.location
    folder, name = os.path.split(path)
    kinds = {} if is_url(path) else {entry.name: entry.kind for entry in backend.list(folder)}
    if not is_url(path) and kinds.get(name) != "directory":
        raise SettingsError(
            f"{path}: expected the directory of a checkpoint to move, found a link; move the directory that it leads to"
        )
    found = first_untracked_files(backend, source.path)
    if path != source.path:
        names = [entry.name for entry in backend.list(path)]
        found += [name for name in names if name != COMMIT_NAME and not is_data_folder(name)]
    if found:
        raise SettingsError(
            f"{path}: expected only a checkpoint to move, found also {', '.join(found)}; move these files away first, "
            "or copy the checkpoint with `jaxckpt cp`"
        )


def remove_checkpoint(backend: Backend, source: Opened) -> None:
    """Remove a checkpoint. A half-removed one is never taken for a checkpoint: it is renamed, or loses COMMIT, first.

    Raises StorageError if another one has been saved at its URL meanwhile.
    """
    path = source.location
    if is_url(path):
        if committed_identity(backend, path) != (source.path, source.committed.manifest_sha256):
            raise StorageError(errno.EBUSY, "was copied and is not removed: another one was saved there since", path)
        backend.remove(f"{path}/{COMMIT_NAME}")
        backend.remove(source.path)
        return
    hidden = rename_to_free(backend, path, attempt_paths(path))
    if hidden is not None:
        sync_directory(backend, os.path.dirname(path))
        remove_replaced(backend, hidden, path)
