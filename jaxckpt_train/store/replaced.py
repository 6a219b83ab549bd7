"""What a reader does about a checkpoint that is replaced or removed while it is read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, NotACheckpointError, StorageError
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.manifest import COMMIT_NAME, MAX_COMMIT_BYTES, NOT_JSON
from jaxckpt_train.store.plain_files import read_or_none
from jaxckpt_train.store.transaction import CommitRecord, Committed, is_gone, open_committed, which_committed

T = TypeVar("T")
LOOKS = 10
UNREADABLE = (NotACheckpointError, CorruptCheckpointError, FormatVersionError, StorageError)
"""What is raised for a checkpoint that cannot be opened; not for a disk that does not answer."""


def refuse_another(files: Opener, committed: Committed, *, may_be_gone: bool) -> None:
    """Make sure that what was read since it was opened is of this checkpoint.

    Args:
        files: where.
        committed: the opened checkpoint.
        may_be_gone: whether it may have been removed since.

    Raises:
        CorruptCheckpointError: another one has taken its place.
        NotACheckpointError: it has been removed.
    """
    raw = read_or_none(files, committed.directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    if raw is None:
        if may_be_gone:
            return
        raise removed(committed.directory)
    if not _is_of(raw, committed):
        raise CorruptCheckpointError(f"{committed.directory}: was replaced while it was being read")


def is_still(files: Opener, committed: Committed) -> bool:
    """Whether it is this checkpoint that is there now, and not another one or none."""
    raw = read_or_none(files, committed.directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    return raw is not None and _is_of(raw, committed)


def _is_of(raw: bytes | bytearray, committed: Committed) -> bool:
    with contextlib.suppress(*NOT_JSON):
        return msgspec.json.decode(raw, type=CommitRecord).manifest_sha256 == committed.manifest_sha256
    return False


def opened(backend: Backend, directory: str, progress: Callable[[int], object] | None = None) -> Committed:
    """As `open_committed`, on a disk that may not answer.

    Raises:
        CheckpointTimeoutError: it has not answered for ten minutes.
        What `progress` raises, which is called with 0 now and then.
    """
    return answer_of(directory, lambda moved: open_committed(backend, directory), progress)


def use_committed(
    backend: Backend,
    directory: str,
    use: Callable[[Committed], T],
    progress: Callable[[int], object] | None = None,
) -> T:
    """Open a checkpoint and call `use` with it; once more whenever another one took its place meanwhile.

    `progress` is called with 0 while it is waited for; what it raises ends that.

    Raises:
        As `open_committed`, and what `use` raises.
    """
    seen = None
    while True:
        try:
            committed = opened(backend, directory, progress)
            seen = _which(committed)
            return use(committed)
        except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
            # Where names are not swapped at once, one look may fall between those of one replacement and of the next.
            looks = 1 if isinstance(error, StorageError) else LOOKS
            now = answer_of(directory, functools.partial(_there, backend, directory, looks), progress)
            if now is None and seen is not None and is_removed(backend, directory, progress):
                raise removed(directory) from error
            if now is None or now == seen:
                raise
            seen = now


def _which(committed: Committed) -> tuple[str, str]:
    """What tells a checkpoint from another that replaces it, and where it lies from where it lies meanwhile."""
    return committed.directory, committed.manifest_sha256


def removed(directory: str) -> NotACheckpointError:
    """The error of who reads what retention, or somebody, has removed."""
    return NotACheckpointError(
        f"{directory}: was removed while it was being read; a run keeps steps that it has pinned, or as many as its "
        "preservation policy says"
    )


def is_removed(backend: Backend, directory: str, progress: Callable[[int], object] | None = None) -> bool:
    """As `is_gone`, on a disk that may not answer; raises as `opened` then."""
    return answer_of(directory, lambda moved: is_gone(backend, directory), progress)


def _there(backend: Backend, directory: str, looks: int, moved: Callable[[], None]) -> tuple[str, str] | None:
    """Which checkpoint is there now, by the first of so many looks that finds one; None: none that can be opened."""
    for _ in range(looks):
        moved()
        with contextlib.suppress(*UNREADABLE):
            if (found := which_committed(backend, directory)) is not None:
                return found
    return None
