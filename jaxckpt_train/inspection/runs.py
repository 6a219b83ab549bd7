"""Which step of a run is the newest one that is whole, by a look at its files or at every byte of them.

Opens what a user names: a checkpoint, a step of a run, or what another tool has written.

One look at a run directory: its steps, what is known of each, and whether it can be read.

The links in a run's directory that stand for steps of it, such as that to the best one.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from jaxckpt_train.checkpoint import IMPORTED_KIND, OURS, Opened, open_found
from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    SettingsError,
    StepNotFoundError,
    StorageError,
)
from jaxckpt_train.formats.flax import FlaxFile
from jaxckpt_train.formats.foreign import ForeignCheckpoint
from jaxckpt_train.run.catalog import foreign_checkpoints, scan_with_notes
from jaxckpt_train.run.entry import Entry, left_behind, newest_generations, parse_step_name
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend, is_storage_failure
from jaxckpt_train.store.backends.local import is_file
from jaxckpt_train.store.backends.local_names import link_target, real_path
from jaxckpt_train.store.committed import (
    Committed,
    diagnose_uncommitted,
    is_committed,
    is_gone,
    open_committed,
    read_committed,
)
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.files import open_recorded
from jaxckpt_train.store.manifest import NOT_JSON, ArrayRecord
from jaxckpt_train.store.verify import file_problems, first_damage

_log = logging.getLogger("jaxckpt_train")


def nbytes_of(array: ArrayRecord | None) -> int:
    """Bytes of the data of a leaf."""
    return 0 if array is None else math.prod(array.shape) * DTYPES[array.dtype].itemsize


def part_bytes(opened: Opened, name: str) -> int:
    """Bytes of the data of a checkpointable, by its name."""
    part = opened.part(name) if name in opened.trees else opened.committed.manifest.part(name)
    assert part is not None
    return sum(map(nbytes_of, part.arrays)) + sum(file.bytes for file in part.files)


def links_to_steps(backend: Backend, directory: str) -> dict[str, str]:
    """The names of links, by the name of the step that each stands for, or for something in it.

    Also of one that leads there by other links, or by another name of the run's directory.

    Raises:
        StorageError: the directory cannot be read.
    """
    found: dict[str, str] = {}
    real = real_path(directory)
    for entry in backend.list(directory):
        path = f"{directory}/{entry.name}"
        target = link_target(path) if entry.kind == "other" else None
        if target is not None:
            as_it_says = _step_in(directory, os.path.normpath(os.path.join(directory, target)))
            found |= {name: entry.name for name in (as_it_says, _step_in(real, real_path(path))) if name is not None}
    return found


def _step_in(directory: str, path: str) -> str | None:
    """The step of a run that a path lies in."""
    if not path.startswith(f"{directory}/"):
        return None
    name = path.removeprefix(f"{directory}/").partition("/")[0]
    return name if parse_step_name(name) is not None else None


class _SizesOfPart(msgspec.Struct):
    files: list[tuple[str, int, str]]


class _Sizes(msgspec.Struct):
    """The part of a manifest that says how large a step is; the rest is skipped, not validated."""

    segments: list[tuple[str, int, int, str]]
    parts: list[_SizesOfPart]


@dataclasses.dataclass(frozen=True)
class StepStatus:
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


def inspect_run(backend: Backend, directory: str) -> list[StepStatus]:
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


def still_there(backend: Backend, directory: str, looks: Sequence[StepStatus]) -> list[StepStatus]:
    """Without those that have a problem and no longer their names: an owner was deleting them while they were read."""
    if all(look.problem is None for look in looks):
        return list(looks)
    names = {entry.name for entry in backend.list(directory)}
    return [look for look in looks if look.problem is None or look.name in names]


def passed_over(looks: Sequence[StepStatus], whole: StepStatus | None) -> list[StepStatus]:
    """What is newer than the newest whole step, if there is one, and cannot be restored; the newest first.

    Not what a roll-back has left behind. What has no manifest does not say when it was saved: its number tells.
    """
    bad = [look for look in looks if look.problem is not None and (look.is_current or look.entry is None)]
    return sorted((look for look in bad if _is_newer(look, whole)), key=lambda look: look.step, reverse=True)


def _is_newer(look: StepStatus, than: StepStatus | None) -> bool:
    if than is None or than.entry is None:
        return True
    if look.entry is not None:
        return look.entry.order > than.entry.order
    return (parse_step_name(look.name) or (look.step, 0)) > (than.step, than.entry.generation)


def newest_whole(looks: Sequence[StepStatus]) -> StepStatus | None:
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


def _looked(backend: Backend, directory: str, entry: Entry, is_current: bool) -> StepStatus:
    refusal = None
    try:
        nbytes, problem = _size(backend, f"{directory}/{entry.name}")
    except CheckpointError as error:
        nbytes, problem = None, str(error)
        refusal = error if is_storage_failure(error) or isinstance(error, FormatVersionError) else None
    if problem is None and entry.damaged is not None:
        problem = f"set aside as damaged: {entry.damaged}"
    return StepStatus(entry.name, entry.step, entry, nbytes, is_current, problem, refusal)


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


def _uncommitted(backend: Backend, directory: str, known: set[str]) -> list[StepStatus]:
    found = []
    for entry in backend.list(directory):
        parsed = parse_step_name(entry.name)
        if parsed is None or entry.name in known:
            continue
        problem = "is no directory, perhaps a link"
        if entry.kind == "directory":
            if not is_gone(backend, f"{directory}/{entry.name}"):
                continue  # it was committed a moment ago
            problem = str(diagnose_uncommitted(backend, f"{directory}/{entry.name}"))
        found.append(StepStatus(entry.name, parsed[0], None, None, False, problem))
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


def open_at(backend: Backend, path: str, step: float | None = None, *, verify: bool = True) -> Opened:
    """Open what is at a path.

    Args:
        backend: where.
        path: absolute; of a checkpoint, a run, or what Orbax, PyTorch, safetensors or Flax have written.
        step: of a run, or of a directory of Flax, where it may have a fraction; None: the newest that is whole, of
            Flax's the newest.
        verify: whether digests are compared when it is read.

    Raises:
        NotACheckpointError: there is none, or no such step; or a step of a run of Orbax has to be chosen.
        SettingsError: the step is that of a run of ours, and no whole number.
        CorruptCheckpointError: it is damaged; of a run, if no step is given, all of its steps are.
        StorageError: it cannot be read, or a newer step cannot, which may be whole.
    """
    settings = StoreSettings(verify_on_load=verify)
    if _is_run(backend, path):
        name, skipped = _step_of(backend, path, step)
        return Opened(OURS, backend, open_committed(backend, f"{path}/{name}"), settings, path, skipped)
    if step is not None or is_file(path):
        return open_found(backend, _foreign(backend, path, step), settings)
    try:
        return Opened(OURS, backend, open_committed(backend, path), settings)
    except NotACheckpointError:
        found = _found(backend, path)
        if found is None:
            raise
    return open_found(backend, found, settings)


def text_of_other(backend: Backend, path: str) -> str:
    """What is at a path that is no run of ours, for a message; empty: nothing that is known here.

    Raises:
        CorruptCheckpointError, NotACheckpointError: another tool has left it, and none of it can be opened.
        StorageError: it cannot be read.
    """
    if is_file(path):
        return "a file"
    found = foreign_checkpoints(backend, path)
    if found:
        return found
    if is_committed(backend, path):
        return "one checkpoint of this package"
    other = _found(backend, path)
    kind = "Flax" if isinstance(other, FlaxFile) else "" if other is None else other.kind
    return f"a checkpoint of {kind}" if kind else ""


def _foreign(backend: Backend, path: str, step: float | None) -> ForeignCheckpoint | FlaxFile:
    """What another tool has written at a path: a file, or one of several in a directory."""
    if step is None:
        from jaxckpt_train.formats.detect import find_file

        return find_file(backend, path)
    found = None if is_file(path) else _found(backend, path, step)
    if found is None:
        raise NotACheckpointError(f"{path}: expected a run to take step {step} of, found none")
    return found


def _found(backend: Backend, path: str, step: float | None = None) -> ForeignCheckpoint | FlaxFile | None:
    """What another tool has left in a directory; its readers are imported when something may be theirs."""
    from jaxckpt_train.formats.detect import find_in_directory

    return find_in_directory(backend, path, step)


def _is_run(backend: Backend, path: str) -> bool:
    try:
        return has_steps(backend, path)
    except StorageError:
        return False


def _step_of(backend: Backend, path: str, step: float | None) -> tuple[str, tuple[str, ...]]:
    """The name of a step, and of those that are passed over for it."""
    looks = inspect_run(backend, path)
    return _newest_of(path, looks) if step is None else (_named(path, looks, step), ())


def _newest_of(path: str, looks: Sequence[StepStatus]) -> tuple[str, tuple[str, ...]]:
    """The newest whole step; one that is newer and damaged is warned of, and one that may be whole is an error."""
    found = newest_whole(looks)
    bad = passed_over(looks, found)
    refused = next((look.refusal for look in bad if look.refusal is not None), None)
    if refused is not None:
        if found is not None:
            hint = f"it may be the newest that is whole; to take an older one, give its number: --step {found.step}"
            if not isinstance(refused, StorageError):
                raise type(refused)(f"{refused}; {hint}") from refused
            raise StorageError(refused.errno, f"{refused.strerror}; {hint}", refused.filename) from refused
        raise refused
    if found is None:
        if not bad:
            raise StepNotFoundError(f"{path}: has no step that can be restored; `jaxckpt ls {path}` says why")
        raise CorruptCheckpointError(
            f"{path}: none of its steps can be restored; `jaxckpt ls {path}` says why of each, and of {bad[0].name}: "
            f"{bad[0].problem}"
        )
    for look in bad:
        _log.warning("%s/%s is passed over: %s", path, look.name, look.problem)
    return found.name, tuple(look.name for look in bad)


def _named(path: str, looks: Sequence[StepStatus], step: float) -> str:
    same = [each for each in looks if each.step == step]
    if not same:
        there = ", ".join(str(each.step) for each in looks[-5:]) or "none"
        if isinstance(step, float) and not step.is_integer():
            raise SettingsError(
                f"{path}: expected a whole number for its step, found {step}; the last ones are {there}"
            )
        raise StepNotFoundError(f"{path}: has no step {step}; the last ones are {there}")
    return next((each.name for each in same if each.is_current), same[-1].name)


def metadata_of(opened: Opened) -> Mapping[str, object]:
    """What a checkpoint says of itself beside its tree."""
    info = opened.committed.manifest.info
    known = ("step", "created", "metrics", "custom_metadata", "versions", "temporary")
    return {name: info[name] for name in known if name in info}


def told_of_import(opened: Opened) -> Mapping[str, object]:
    """What the manifest of its import says of where that comes from; the kind is that of the first of several."""
    first = None if opened.wrote_tree == OURS else opened.wrote_tree
    return {"imported_from": opened.path} | ({} if first is None else {IMPORTED_KIND: first})


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
    if is_storage_failure(error):
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
