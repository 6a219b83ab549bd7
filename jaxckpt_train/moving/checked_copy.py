"""Copies a checkpoint of ours: nothing gets its name that was not compared with the source first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError
from jaxckpt_train.moving.sameness import refuse_another_content
from jaxckpt_train.opened import OURS, Opened
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.steps.entry import Entry, entry_from_manifest
from jaxckpt_train.steps.history import metrics_to_json
from jaxckpt_train.steps.notes import Notes
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.copying import copy_checkpoint
from jaxckpt_train.store.final_name import refuse_existing, refuse_left_over_name, remove_left_overs
from jaxckpt_train.store.local import file_exists
from jaxckpt_train.store.local_names import remove_if_empty
from jaxckpt_train.store.replaced import use_committed
from jaxckpt_train.store.transaction import Committed, open_committed, which_committed
from jaxckpt_train.store.verify import first_damage

_OVERWRITE = "pass --overwrite"


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
    refuse_left_over_name(final)
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
            remove_left_overs(backend, final)
        done = use_committed(backend, source.path, copy)
    except BaseException:
        for folder in new_folders:
            remove_if_empty(folder)
        raise
    if which_committed(backend, final) != (final, done.manifest_sha256):
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
