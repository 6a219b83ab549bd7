"""One look at a run directory: its steps, what is known of each, and whether it can be read."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence

import msgspec

from jaxckpt_train.errors import CheckpointError, FormatVersionError, NotACheckpointError, StorageError
from jaxckpt_train.steps.catalog import scan_with_notes
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.history import HISTORY_NAME
from jaxckpt_train.steps.lineage import left_behind, newest_generations
from jaxckpt_train.steps.lock import LOCK_NAME
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import GONE, Backend, is_refusal
from jaxckpt_train.store.local import is_file
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.transaction import is_gone, read_committed
from jaxckpt_train.store.why_not import why_not_committed


class _SizesOfPart(msgspec.Struct):
    files: list[tuple[str, int, str]]


class _Sizes(msgspec.Struct):
    """The part of a manifest that says how large a step is; the rest is skipped, not validated."""

    segments: list[tuple[str, int, int, str]]
    parts: list[_SizesOfPart]


@dataclasses.dataclass(frozen=True)
class StepLook:
    """A step of a run, or what should be one.

    Attributes:
        name: of its directory.
        step: its label.
        entry: what is known of it; None: it is not committed.
        nbytes: of its data files; None: not known.
        is_current: whether the run goes on from it or from a later one: it was not left behind, or saved anew.
        problem: why it cannot be restored; None: nothing that a look at its manifest tells.
        refusal: what the disk has refused, or that it is of a newer version, if that is the problem: it is not known to
            be damaged then.
    """

    name: str
    step: int
    entry: Entry | None
    nbytes: int | None
    is_current: bool
    problem: str | None
    refusal: CheckpointError | None = None


def look_at_run(backend: Backend, directory: str) -> list[StepLook]:
    """The steps of a run, lowest first, also those that are damaged, left behind or not committed.

    What its owner has deleted meanwhile is not among them.

    Raises:
        NotACheckpointError: there is no such directory.
        StorageError: it cannot be read.
    """
    _refuse_nothing(backend, directory)
    entries, notes = scan_with_notes(backend, directory)
    left = left_behind(entries, notes.roll_back)
    current = {entry.name for entry in newest_generations([each for each in entries if each.name not in left])}
    found = [_looked(backend, directory, entry, entry.name in current) for entry in entries]
    found += _uncommitted(backend, directory, {entry.name for entry in entries})
    return sorted(still_there(backend, directory, found), key=lambda each: (each.step, each.name))


def still_there(backend: Backend, directory: str, looks: Sequence[StepLook]) -> list[StepLook]:
    """Without those that have a problem and no longer their names: an owner was deleting them while they were read."""
    if all(look.problem is None for look in looks):
        return list(looks)
    names = {entry.name for entry in backend.list(directory)}
    return [look for look in looks if look.problem is None or look.name in names]


def passed_over(looks: Sequence[StepLook], whole: StepLook | None) -> list[StepLook]:
    """What is newer than the newest whole step, if there is one, and cannot be restored; the newest first.

    Not what a roll-back has left behind. What has no manifest does not say when it was saved: its number tells.
    """
    bad = [look for look in looks if look.problem is not None and (look.is_current or look.entry is None)]
    return sorted((look for look in bad if _is_newer(look, whole)), key=lambda look: look.step, reverse=True)


def _is_newer(look: StepLook, than: StepLook | None) -> bool:
    if than is None or than.entry is None:
        return True
    if look.entry is not None:
        return look.entry.order > than.entry.order
    return (parse_step_name(look.name) or (look.step, 0)) > (than.step, than.entry.generation)


def newest_whole(looks: Sequence[StepLook]) -> StepLook | None:
    """The step that a restore would take; None: there is none."""
    good = [each for each in looks if each.entry is not None and each.is_current and each.problem is None]
    return max(good, key=lambda each: each.entry.order if each.entry is not None else (0, 0, 0), default=None)


def _refuse_nothing(backend: Backend, directory: str) -> None:
    """Raise NotACheckpointError if there is no such directory; StorageError: it cannot be read."""
    try:
        backend.list(directory)
    except StorageError as error:
        if error.errno not in {*GONE, errno.ENOTDIR}:
            raise
        found = "a file" if is_file(directory) else "nothing"
        raise NotACheckpointError(f"{directory}: expected a directory, found {found}") from error


def _looked(backend: Backend, directory: str, entry: Entry, is_current: bool) -> StepLook:
    refusal = None
    try:
        nbytes, problem = _size(backend, f"{directory}/{entry.name}")
    except CheckpointError as error:
        nbytes, problem = None, str(error)
        refusal = error if is_refusal(error) or isinstance(error, FormatVersionError) else None
    if problem is None and entry.damaged is not None:
        problem = f"set aside as damaged: {entry.damaged}"
    return StepLook(entry.name, entry.step, entry, nbytes, is_current, problem, refusal)


def _size(backend: Backend, directory: str) -> tuple[int | None, str | None]:
    try:
        found = read_committed(backend, directory)
        if found is None:
            return None, "its COMMIT is gone"
        sizes = msgspec.json.decode(found[0], type=_Sizes)
    except NOT_JSON as error:
        return None, f"{directory}: its manifest is not valid: {error}"
    segments = sum(segment[1] for segment in sizes.segments)
    return segments + sum(file[1] for part in sizes.parts for file in part.files), None


def _uncommitted(backend: Backend, directory: str, known: set[str]) -> list[StepLook]:
    found = []
    for entry in backend.list(directory):
        parsed = parse_step_name(entry.name)
        if parsed is None or entry.name in known:
            continue
        problem = "is no directory, perhaps a link"
        if entry.kind == "directory":
            if not is_gone(backend, f"{directory}/{entry.name}"):
                continue  # it was committed a moment ago
            problem = str(why_not_committed(backend, f"{directory}/{entry.name}"))
        found.append(StepLook(entry.name, parsed[0], None, None, False, problem))
    return found


def has_steps(backend: Backend, directory: str) -> bool:
    """Whether a directory is a run's: it has something with the name of a step.

    Raises:
        StorageError: it cannot be read.
    """
    return any(parse_step_name(entry.name) is not None for entry in backend.list(directory))


def is_run(backend: Backend, directory: str) -> bool:
    """Whether a directory is, or was, a run's: it has steps, an owner or a history. One that is not there is none.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        names = {entry.name for entry in backend.list(directory)}
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            return False
        raise
    return bool(names & {LOCK_NAME, HISTORY_NAME}) or any(parse_step_name(name) is not None for name in names)
