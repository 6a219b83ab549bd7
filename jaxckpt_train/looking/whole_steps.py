"""Which step of a run is the newest one that is whole, by a look at its files or at every byte of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StorageError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.store.backend import Backend, is_refusal
from jaxckpt_train.store.plain_files import open_recorded
from jaxckpt_train.store.transaction import Committed, is_gone, open_committed
from jaxckpt_train.store.verify import file_problems, first_damage


@dataclasses.dataclass(frozen=True)
class NewestWhole:
    """What was found.

    Attributes:
        entry: the newest step that is whole; None: none is.
        damaged: what is wrong with each that is newer, by step.
        refused: why others that are newer could not be read, by step: they may be whole.
    """

    entry: Entry | None
    damaged: dict[int, str]
    refused: dict[int, StorageError] = dataclasses.field(default_factory=dict)


def newest_whole_step(
    backend: Backend,
    directory: str,
    newest: Sequence[Entry],
    *,
    every_byte: bool,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> NewestWhole:
    """Look from the newest step back until one is whole.

    Args:
        backend, directory: where the run is.
        newest: the steps that it goes on from, the newest last.
        every_byte: whether all bytes are compared with their digests; else files are only looked for, and their sizes.
        progress: called with numbers of bytes as they are read.

    Raises:
        CheckpointTimeoutError: the disk does not answer.
    """
    damaged, refused = dict[int, str](), dict[int, StorageError]()
    for entry in reversed(newest):
        path = f"{directory}/{entry.name}"
        try:
            problem = _damage(backend, path, progress) if every_byte else missing_or_cut(backend, path)
        except StorageError as error:
            refused[entry.step] = error
            continue
        if problem is None:
            return NewestWhole(entry, damaged, refused)
        if not is_gone(backend, path):  # else its owner has deleted it meanwhile
            damaged[entry.step] = problem
    return NewestWhole(None, damaged, refused)


def _damage(backend: Backend, path: str, progress: Callable[[int], None]) -> str | None:
    try:
        return first_damage(backend, path, progress)
    except CheckpointError as error:
        return _told(error)


def missing_or_cut(backend: Backend, path: str) -> str | None:
    """What is wrong with a step by its manifest and the sizes of its files; None: nothing.

    Raises:
        StorageError: the disk does not tell.
    """
    try:
        committed = open_committed(backend, path)
        return _wrong_size(backend, committed)
    except CheckpointError as error:
        return _told(error)


def _told(error: CheckpointError) -> str:
    """The damage that an error tells of; one that only says that the disk refuses, or does not answer, is raised."""
    if is_refusal(error):
        raise error
    return str(error)


def _wrong_size(backend: Backend, committed: Committed) -> str | None:
    for segment in committed.manifest.segments:
        try:
            open_recorded(backend, committed.directory, segment.file, segment.bytes, subject="segment").close()
        except CorruptCheckpointError as error:
            return str(error)
    for part in committed.manifest.parts:
        for file in part.files:
            for problem in file_problems(backend, committed, file, digests=False):
                return problem
    return None
