"""Opens what a user names, and inspects the steps of a run: which exist, which can be restored, and which is newest.

`inspect_run` reads the manifest of each step. `check_newest` also checks files: their sizes, or every byte.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    StepNotFoundError,
    StorageError,
)
from jaxckpt_train.opened import IMPORTED_KIND, OURS, Opened, open_found
from jaxckpt_train.run.catalog import scan_with_record
from jaxckpt_train.run.entry import Entry, left_behind, newest_generations, parse_step_name
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend, is_storage_failure
from jaxckpt_train.store.backends.local_names import real_path
from jaxckpt_train.store.committed import RECORD_NAME, diagnose_uncommitted, is_gone, open_committed, read_committed
from jaxckpt_train.store.files import is_file, open_recorded
from jaxckpt_train.store.manifest import NOT_JSON, ArrayRecord, IndexRecord
from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.store.threads import shared_workers
from jaxckpt_train.store.verify import first_damage

READS_AT_ONCE = 8  # manifests of a run on an object store
_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class StepStatus:
    """A step of a run, or a directory with the name of a step.

    With a `refusal` (an error of the storage, or a newer format version) it is not known to be damaged.
    """

    name: str
    step: int
    entry: Entry | None  # None: it is not committed
    nbytes: int | None
    is_current: bool  # False after a roll-back behind it, or after it was saved again and not set aside
    problem: str | None  # why it cannot be restored, as far as its manifest shows
    refusal: CheckpointError | None = None
    taken_bytes: int = 0  # of files that it took over from the step before
    tier: Literal["slow", "fast", "both"] = "slow"  # as far as this host knows
    absent_files: int = 0  # of a step of the fast tier: those that only other hosts have

    @property
    def written_bytes(self) -> int | None:
        """How many bytes its save wrote."""
        return None if self.nbytes is None else self.nbytes - self.taken_bytes

    @property
    def is_restorable(self) -> bool:
        """Whether a run may continue from this step, according to its manifest."""
        return self.entry is not None and self.is_current and self.problem is None


def inspect_run(backend: Backend, directory: str) -> list[StepStatus]:
    """Return the steps of a run, lowest first. They include damaged, superseded and uncommitted ones.

    Steps that the owner of the run deletes in the meantime are left out.
    """
    if not is_url(directory):
        _refuse_missing(backend, directory)
    entries, record = scan_with_record(backend, directory)
    left = left_behind(entries, record.record.roll_back)
    line = [entry for entry in entries if entry.name not in left]
    intact = [entry for entry in line if entry.damaged is None]
    current = {entry.name for entry in [*newest_generations(line), *newest_generations(intact)]}
    inspect = functools.partial(_inspect_step, backend, directory, current)
    if is_url(directory):
        found = [*shared_workers(READS_AT_ONCE, "jaxckpt-inspect").run_each(inspect, entries)]
    else:
        found = [*map(inspect, entries)]
    if not record.has_steps:
        found += _uncommitted_steps(backend, directory, {entry.name for entry in entries})
    if any(status.problem is not None for status in found):  # perhaps because the owner has deleted it meanwhile
        names = current_names(backend, directory)
        found = [status for status in found if status.problem is None or status.name in names]
    return sorted(found, key=lambda each: (each.step, each.name))


def _refuse_missing(backend: Backend, directory: str) -> None:
    try:
        backend.list(directory)
    except StorageError as error:
        if error.errno not in {*GONE, errno.ENOTDIR}:
            raise
        raise NotACheckpointError(f"{directory}: expected a directory, found none") from error


def current_names(backend: Backend, directory: str) -> set[str]:
    """Return the names in a run directory. On an object store, where the data of deleted steps stays: of its steps."""
    if is_url(directory):
        record = FoundRecord(backend, directory)
        if record.has_steps:
            return {*(record.record.steps or ())}
    return {entry.name for entry in backend.list(directory)}


def _inspect_step(backend: Backend, directory: str, current: Collection[str], entry: Entry) -> StepStatus:
    nbytes, taken_bytes, problem, refusal = None, 0, None, None
    try:
        nbytes, taken_bytes = _data_bytes(backend, f"{directory}/{entry.name}")
    except CheckpointError as error:
        problem, refusal = str(error), _refusal(error)
    if problem is None and entry.damaged is not None:
        problem = f"set aside as damaged: {entry.damaged}"
    return StepStatus(entry.name, entry.step, entry, nbytes, entry.name in current, problem, refusal, taken_bytes)


def _refusal(error: CheckpointError) -> CheckpointError | None:
    """Return the error of a step if it does not show that the step is damaged, or None."""
    return error if is_storage_failure(error) or isinstance(error, FormatVersionError) else None


class _PartSizes(msgspec.Struct):
    files: list[tuple[str, int, str]]


class _Taken(msgspec.Struct):
    taken_bytes: int = 0


class _Sizes(msgspec.Struct):
    """The sizes in a manifest. The rest of it is neither decoded nor validated."""

    segments: list[tuple[str, int, int, str]]
    parts: list[_PartSizes]
    info: _Taken
    index: IndexRecord | None = None


def _data_bytes(backend: Backend, directory: str) -> tuple[int, int]:
    """The size of the data of a checkpoint, and how much of it was taken over from the one before."""
    found = read_committed(backend, directory)
    if found is None:
        raise CorruptCheckpointError("its COMMIT no longer exists")
    try:
        sizes = msgspec.json.decode(found[0], type=_Sizes)
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{directory}: expected a valid manifest, found something else: {error}"
        ) from error
    files = sum(file[1] for part in sizes.parts for file in part.files)
    in_index_files = 0 if sizes.index is None else sizes.index.data_bytes
    return sum(segment[1] for segment in sizes.segments) + files + in_index_files, sizes.info.taken_bytes


def _uncommitted_steps(backend: Backend, directory: str, known: set[str]) -> list[StepStatus]:
    found = []
    for entry in backend.list(directory):
        parsed = parse_step_name(entry.name)
        if parsed is None or entry.name in known:
            continue
        problem = "is not a directory, perhaps a link"
        if entry.kind == "directory":
            if not is_gone(backend, f"{directory}/{entry.name}"):
                continue  # committed during the inspection
            problem = str(diagnose_uncommitted(backend, f"{directory}/{entry.name}"))
        found.append(StepStatus(entry.name, parsed[0], None, None, False, problem))
    return found


def newest_whole(statuses: Sequence[StepStatus]) -> StepStatus | None:
    """Return the step that a restore would load, or None."""
    return next(iter(_restorable(statuses)), None)


def _restorable(statuses: Sequence[StepStatus]) -> list[StepStatus]:
    """Return the steps that a restore would try, in this order."""
    good = [each for each in statuses if each.is_restorable]
    return sorted(good, key=lambda each: each.entry.order if each.entry is not None else (0, 0, 0), reverse=True)


def check_newest(
    backend: Backend,
    directory: str,
    statuses: Sequence[StepStatus],
    *,
    every_byte: bool,
    progress: Callable[[int], None] | None = None,
) -> list[StepStatus]:
    """Check the files of the newest steps, by all bytes or by sizes, until one is valid.

    Returns all statuses, with the problems found. A step that its owner has deleted in the meantime is left out.
    """
    found = {status.name: status for status in statuses}
    for status in _restorable(statuses):
        path, problem, refusal = f"{directory}/{status.name}", None, None
        try:
            if every_byte:
                problem = first_damage(backend, path, progress)
            else:
                _check_sizes(backend, path)
        except CheckpointTimeoutError:
            raise  # the other steps would take as long
        except CheckpointError as error:
            problem, refusal = str(error), _refusal(error)
        if problem is None:
            break
        if refusal is None and is_gone(backend, path):
            del found[status.name]
        else:
            found[status.name] = dataclasses.replace(status, problem=problem, refusal=refusal)
    return [*found.values()]


def _check_sizes(backend: Backend, path: str) -> None:
    """Raise CorruptCheckpointError if the manifest is damaged, or a file is missing or has another size."""
    manifest = open_committed(backend, path).manifest
    for segment in manifest.segments:
        open_recorded(backend, path, segment.file, segment.bytes, subject="segment").close()
    for part in manifest.parts:
        for file in part.files:
            open_recorded(backend, path, file.file, file.bytes).close()


def newer_broken(statuses: Sequence[StepStatus], whole: StepStatus | None) -> list[StepStatus]:
    """Return the steps of the current branch newer than the valid one that cannot be restored, the newest first."""
    bad = [status for status in statuses if status.problem is not None and (status.is_current or status.entry is None)]
    return [status for status in reversed(bad) if _is_newer(status, whole)]


def _is_newer(status: StepStatus, than: StepStatus | None) -> bool:
    if than is None or than.entry is None:
        return True
    if status.entry is not None:
        return status.entry.order > than.entry.order
    # Without a manifest the time of the save is unknown, so the number counts.
    return (parse_step_name(status.name) or (status.step, 0)) > (than.step, than.entry.generation)


def is_run(backend: Backend, directory: str) -> bool:
    """Return whether a directory has the steps, the lock or the history of a run. It may be missing."""
    if is_url(directory) and backend.read_record(f"{directory}/{RECORD_NAME}") is not None:
        return True
    names = _names(backend, directory)
    return not names.isdisjoint({LOCK_NAME, HISTORY_NAME}) or _has_steps(names)


def _has_steps(names: set[str]) -> bool:
    return any(parse_step_name(name) is not None for name in names)


def _names(backend: Backend, directory: str) -> set[str]:
    """Return the names in a directory; none if it does not exist."""
    try:
        return {entry.name for entry in backend.list(directory)}
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            return set()
        raise


def open_at(backend: Backend, path: str, step: float | None = None) -> Opened:
    """Open a checkpoint, a step of a run, or a checkpoint of Orbax, PyTorch, safetensors or Flax.

    Without `step`, the newest valid step of a run is opened, unless a newer one cannot be read and may be valid. The
    step of a directory of Flax may have a fraction.
    """
    settings = StoreSettings()
    if _has_steps(_names(backend, path)):  # a lock and a history may be next to the steps of another tool
        statuses, skipped = inspect_run(backend, path), tuple[str, ...]()
        if step is None:
            name, skipped = _choose_newest(path, statuses)
        else:
            name = _choose_by_number(path, statuses, step)
        return Opened(OURS, backend, open_committed(backend, f"{path}/{name}"), settings, path, skipped)
    is_one_file = is_file(backend, path)
    nothing = NotACheckpointError(f"{path}: expected a run with a step {step}, found none")
    if step is None and not is_one_file:
        try:
            return Opened(OURS, backend, open_committed(backend, path), settings)
        except NotACheckpointError as error:
            nothing = error
    from jaxckpt_train.formats.detect import find_file, find_in_directory  # imports the readers of all tools

    if is_one_file:
        found = find_file(backend, path) if step is None else None
    else:
        found = find_in_directory(backend, path, step)
    if found is None:
        raise nothing
    return open_found(backend, found, settings)


def _choose_newest(path: str, statuses: Sequence[StepStatus]) -> tuple[str, tuple[str, ...]]:
    """Return the names of the newest valid step, and of newer damaged ones. Refuse if a newer one may be valid."""
    found = newest_whole(statuses)
    bad = newer_broken(statuses, found)
    refused = next((status.refusal for status in bad if status.refusal is not None), None)
    if refused is not None and found is not None:
        hint = f"it may be the newest valid step; to take an older one, pass its number: --step {found.step}"
        if isinstance(refused, StorageError):
            raise StorageError(refused.errno, f"{refused.strerror}; {hint}", refused.filename) from refused
        raise type(refused)(f"{refused}; {hint}") from refused
    if refused is not None:
        raise refused
    if found is None:
        reasons = f"see `jaxckpt ls {path}` for the reasons"
        if not bad:
            raise StepNotFoundError(f"{path}: has no step that can be restored; {reasons}")
        raise CorruptCheckpointError(
            f"{path}: none of its steps can be restored; {reasons}; {bad[0].name}: {bad[0].problem}"
        )
    for status in bad:
        _log.warning("%s/%s is skipped: %s", path, status.name, status.problem)
    return found.name, tuple(status.name for status in bad)


def _choose_by_number(path: str, statuses: Sequence[StepStatus], step: float) -> str:
    same = [each for each in statuses if each.step == step]
    if not same:
        there = ", ".join(str(each.step) for each in statuses[-5:]) or "none"
        raise StepNotFoundError(f"{path}: has no step {step}; the last steps are {there}")
    return next((each.name for each in same if each.is_current), same[-1].name)


def links_to_steps(backend: Backend, directory: str) -> dict[str, str]:
    """Return the names of links in a run directory, by the name of the step that each of them leads to or into."""
    if is_url(directory):
        return {step: link for link, step in FoundRecord(backend, directory).record.links.items()}
    inside = f"{real_path(directory)}/"
    links = [entry.name for entry in backend.list(directory) if entry.kind == "other"]
    targets = [(link, real_path(f"{directory}/{link}")) for link in links]
    return {
        target.removeprefix(inside).partition("/")[0]: link for link, target in targets if target.startswith(inside)
    }


def nbytes_of(array: ArrayRecord | None) -> int:
    """Return the size in bytes of a leaf's data."""
    return 0 if array is None else math.prod(array.shape) * DTYPES[array.dtype].itemsize


def part_bytes(opened: Opened, name: str) -> int:
    """Return the size in bytes of a checkpointable's data."""
    part = opened.part(name) if name in opened.trees else opened.committed.manifest.part(name)
    assert part is not None
    return sum(map(nbytes_of, part.arrays)) + sum(file.bytes for file in part.files)


def metadata_of(opened: Opened) -> Mapping[str, object]:
    """Return the information about a checkpoint in its manifest."""
    info = opened.committed.manifest.info
    known = ("step", "created", "metrics", "custom_metadata", "versions", "temporary")
    return {name: info[name] for name in known if name in info}


def import_info(opened: Opened) -> Mapping[str, object]:
    """Return the origin of an imported checkpoint for its manifest; its kind is that before the first import."""
    first = None if opened.wrote_tree == OURS else opened.wrote_tree
    return {"imported_from": opened.location} | ({} if first is None else {IMPORTED_KIND: first})
