"""Save checkpointables: stage them on the caller's thread, then write and commit them on another thread.

`ContentComparison` checks that the processes of a job save the same content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxckpt_train._validation import named
from jaxckpt_train.checkpointables.base import NOTHING, Staged
from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.errors import (
    CheckpointTimeoutError,
    MismatchError,
    NonFiniteError,
    SettingsError,
    UnsupportedLeafError,
)
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave, ProgressTracker, start_save
from jaxckpt_train.pytree.colocated.transfer import write_on_hosts
from jaxckpt_train.pytree.copies import TransferBudget
from jaxckpt_train.pytree.leaves import encode_tree
from jaxckpt_train.pytree.partition import JobPartition
from jaxckpt_train.pytree.paths import refuse_too_deep, refused_if_too_deep
from jaxckpt_train.pytree.snapshot import Snapshot, snapshot
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.files import block_digests, digest_function
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    is_plain_name,
    plain_name_rule,
)
from jaxckpt_train.store.manifest_decoding import encode_value
from jaxckpt_train.store.segment import ChunkSource
from jaxckpt_train.store.transaction import Transaction
from jaxckpt_train.store.writer import Progress, WrittenArrays, write_arrays

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")
MAX_SHOWN = 5  # leaves or differences in a message


class OwnFiles:
    """Lets an object write its own files; `is_writing` is set meanwhile, since this may take long."""

    def __init__(self, write_files: Callable[[Path], None]) -> None:
        self._write_files = write_files
        self.is_writing = False

    def write(self, folder: Path) -> None:
        """Write the files into the folder."""
        self.is_writing = True
        try:
            self._write_files(folder)
        finally:
            self.is_writing = False


@dataclasses.dataclass(frozen=True)
class StagedPart:
    """One staged checkpointable, which later changes by its owner do not affect.

    Attributes:
        same: for a value that each process of a job has: the content that must be equal if one value stands for all.
    """

    name: str
    kind: str
    snapshot: Snapshot | None = None
    value: bytes | None = None
    same: bytes | None = None
    own_files: OwnFiles | None = None


@dataclasses.dataclass(frozen=True)
class StagedValue:
    """A checkpointable that its handler staged earlier, to be saved as it was then."""

    kind: str
    staged: Staged


def take(value: Any) -> StagedValue:
    """Let the handler of a checkpointable stage it now."""
    handler = handler_of(value)
    return StagedValue(handler.kind, handler.stage(value))


@dataclasses.dataclass
class SaveTimes:
    """The duration of each phase of a save in seconds, and the number of bytes that this process wrote.

    `snapshot_s` and `stage_s` (checkpointables other than pytrees) blocked the caller; the other phases did not. During
    `device_wait_s` the devices computed updates that JAX had queued. This is training time, and no other phase includes
    it.
    """

    device_wait_s: float = 0.0
    snapshot_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    bytes: int = 0


def stage_all(
    checkpointables: Mapping[str, Any], times: SaveTimes, settings: StoreSettings, partition: JobPartition | None = None
) -> list[StagedPart]:
    """Stage all checkpointables as they are now. `wait_until_taken` waits until all of them are safe.

    Args:
        checkpointables: the values by name.
        times: records the durations.
        settings: how they are saved.
        partition: in a multi-process job, which parts of the arrays this process saves.

    Raises:
        SettingsError: `checkpointables` is not a mapping or is empty, a name cannot be the name of a directory, or the
            package of the digest is not installed.
        UnsupportedLeafError: a value cannot be stored.
    """
    digest_function(settings.digest)  # raise here, and not in the background, if its package is missing
    if not named("checkpointables", checkpointables):
        raise SettingsError('checkpointables: expected values by name, such as {"state": state}, found none')
    parts, ahead = [], TransferBudget(settings.staging_bytes)
    for name, value in checkpointables.items():
        if not isinstance(name, str) or not is_plain_name(name):
            raise SettingsError(f"checkpointable name {name!r}: expected {plain_name_rule()}")
        try:
            with refused_if_too_deep("the tree"):
                parts.append(_stage(name, value, times, settings, ahead, partition))
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"checkpointable {name!r}: {error}") from error
    return parts


def _stage(
    name: str,
    value: Any,
    times: SaveTimes,
    settings: StoreSettings,
    ahead: TransferBudget,
    partition: JobPartition | None,
) -> StagedPart:
    started = time.perf_counter()
    staged_value = value if isinstance(value, StagedValue) else take(value)
    kind, staged = staged_value.kind, staged_value.staged
    if staged.tree is not value:  # the search for a handler has already checked `value`
        refuse_too_deep("the tree", staged.tree)
    is_value = staged.tree is NOTHING and staged.write_files is None
    encoded = encode_value(staged.value) if is_value else None
    now = time.perf_counter()
    times.stage_s += now - started
    if staged.write_files is not None:
        return StagedPart(name, kind, own_files=OwnFiles(staged.write_files))
    if encoded is not None:
        same = None if staged.same is NOTHING else encode_value(staged.same)
        return StagedPart(name, kind, value=encoded, same=same)
    is_guarded = settings.nonfinite != "allow"
    taken = snapshot(
        staged.tree, settings.snapshot, ahead, is_guarded=is_guarded, partition=partition, colocated=settings.colocated
    )
    times.device_wait_s += taken.device_wait_s
    times.snapshot_s += time.perf_counter() - now - taken.device_wait_s
    return StagedPart(name, kind, snapshot=taken)


def wait_until_taken(
    parts: Sequence[StagedPart],
    pending: PendingSave[T],
    timeout_s: float | None = None,
    patience_s: float = LAST_PATIENCE_S,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the caller may change the values that `pending` saves.

    Raises:
        CheckpointTimeoutError: the time limit was exceeded, the save made no progress for `patience_s` seconds, or
            `until` returned true. The save then fails.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    for part in parts:
        if part.snapshot is not None:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            reason = pending.wait_for(part.snapshot.is_taken, left_s, patience_s, until)
            if reason is not None and _give_up(parts):
                raise CheckpointTimeoutError(
                    f"saving {pending.subject}: {reason}; abandoned before its state was copied"
                )


def _give_up(parts: Sequence[StagedPart]) -> bool:
    """Make the save fail and release the state; return False if the whole state was copied after all."""
    transfers = [part.snapshot.transfers for part in parts if part.snapshot is not None]
    is_given_up = any(each.give_up() for each in transfers if each is not None)
    if is_given_up:
        close_parts(parts)
    return is_given_up


def make_tracker(parts: Sequence[StagedPart]) -> ProgressTracker:
    """Return a progress tracker that excuses waits for computations and for objects that write their own files.

    It holds no reference to the staged values.
    """
    snapshots = [part.snapshot for part in parts if part.snapshot is not None]
    transfers = [weakref.ref(each.transfers) for each in snapshots if each.transfers is not None]
    guards = [weakref.ref(each.guard) for each in snapshots if each.guard is not None]
    on_hosts = [weakref.ref(each.on_hosts) for each in snapshots if each.on_hosts is not None]
    owners = [weakref.ref(part.own_files) for part in parts if part.own_files is not None]

    def is_excused() -> bool:
        fetching = any(here.fetching for each in transfers if (here := each()) is not None)
        looking = any(guard.is_looking for each in guards if (guard := each()) is not None)
        waiting = any(parts.is_waiting for each in on_hosts if (parts := each()) is not None)
        return (
            fetching or looking or waiting or any(owner.is_writing for each in owners if (owner := each()) is not None)
        )

    return ProgressTracker(is_excused)


def write_parts(
    transaction: Transaction,
    backend: Backend,
    parts: Sequence[StagedPart],
    info: Mapping[str, Any],
    settings: StoreSettings,
    times: SaveTimes,
    *,
    replace: bool,
    progress: Progress,
) -> Committed:
    """Write all parts of an attempt and commit it. If this fails, remove the attempt and raise the error."""
    with undo_on_error(transaction, parts):
        wait_for_devices(parts, times)
        check_finite(transaction.final, parts, settings)
        started = time.perf_counter()
        segments: list[SegmentRecord] = []
        records = [_write_part(transaction, backend, part, segments, settings, times, progress) for part in parts]
        times.write_s = time.perf_counter() - started
        started = time.perf_counter()
        manifest = Manifest(
            FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, tuple(segments), tuple(records), dict(info)
        )
        committed = transaction.commit(manifest, replace=replace)
        times.commit_s = time.perf_counter() - started
    close_parts(parts)
    return committed


def wait_for_devices(parts: Sequence[StagedPart], times: SaveTimes) -> None:
    """Wait until the devices have computed the staged values. This runs on the writing thread."""
    snapshots = [part.snapshot for part in parts if part.snapshot is not None]
    times.device_wait_s += sum(snapshot.wait_for_devices() for snapshot in snapshots)


def check_finite(subject: str, parts: Sequence[StagedPart], settings: StoreSettings) -> None:
    """Warn about nan and inf, or refuse to save them, before a byte is written."""
    guards = [(part.name, part.snapshot.guard) for part in parts if part.snapshot is not None]
    found = [(f"{name}/{leaf}", flaw) for name, guard in guards if guard is not None for leaf, flaw in guard.flaws()]
    if not found:
        return
    shown = ", ".join(f"{leaf!r} ({flaw})" for leaf, flaw in found[:MAX_SHOWN])
    more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    problem = f"{subject}: {len(found)} {'leaf holds' if len(found) == 1 else 'leaves hold'} nan or inf: {shown}{more}"
    if settings.nonfinite == "warn":
        _log.warning("%s; saved anyway", problem)
        return
    raise NonFiniteError(
        f'{problem}. The state is not saved, because nonfinite is "reject"; earlier checkpoints are unchanged. Find '
        "the first step with these values, for example with jax.config.update('jax_debug_nans', True)",
        tuple(leaf for leaf, _ in found),
    )


def begin_save(
    subject: str,
    work: Callable[[], T],
    transaction: Transaction | None,
    parts: Sequence[StagedPart],
    tracker: ProgressTracker,
    on_start: Callable[[PendingSave[T] | None], None] = lambda pending: None,
) -> PendingSave[T]:
    """Start the save of an attempt, and remove the attempt if the save cannot start.

    Args:
        subject: the name of what is saved, for messages.
        work: runs the save.
        transaction: the attempt. None: `work` begins it.
        parts: the staged checkpointables.
        tracker: measures the progress.
        on_start: as for `start_save`.
    """
    undo = functools.partial(_undo, transaction, parts)
    return start_save(subject, work, tracker=tracker, on_start=on_start, undo=undo)


@contextlib.contextmanager
def undo_on_error(transaction: Transaction | None, parts: Sequence[StagedPart]) -> Iterator[None]:
    """Release the state and remove the attempt, if there is one, after an error within the context."""
    try:
        yield
    except BaseException as error:
        _undo(transaction, parts, error)
        raise


def _undo(transaction: Transaction | None, parts: Sequence[StagedPart], error: BaseException) -> None:
    close_parts(parts)
    if transaction is not None:
        transaction.abort_after(error)


def close_parts(parts: Sequence[StagedPart]) -> None:
    """Release the state."""
    for part in parts:
        if part.snapshot is not None:
            part.snapshot.close()


def _write_part(
    transaction: Transaction,
    backend: Backend,
    part: StagedPart,
    segments: list[SegmentRecord],
    settings: StoreSettings,
    times: SaveTimes,
    progress: Progress,
) -> PartRecord:
    folder = transaction.add_folder(part.name)
    progress(0)
    files: tuple[FileRecord, ...] = ()
    if part.snapshot is not None:
        written = write_arrays(
            backend,
            transaction.directory,
            part.name,
            part.snapshot.arrays,
            settings,
            first_segment=len(segments),
            progress=progress,
        )
        if part.snapshot.on_hosts is not None:
            parts, arrays = part.snapshot.on_hosts, part.snapshot.arrays
            written = write_on_hosts(
                transaction.directory, part.name, arrays, parts, written, segments, settings, progress
            )
        segments.extend(written.segments)
        times.bytes += written.data_bytes
        return PartRecord(part.name, part.kind, written.arrays, files, encode_tree(part.snapshot.record))
    if part.value is not None:
        files = (transaction.write_file(value_file(part.name), part.value),)
    elif part.own_files is not None:
        part.own_files.write(Path(folder))
        progress(0)
        files = transaction.adopt_folder(part.name, progress)
    times.bytes += sum(file.bytes for file in files)
    return PartRecord(part.name, part.kind, (), files, msgspec.Raw(b"null"))


def value_file(name: str, process: int = 0) -> str:
    """Return the file name for the value of one process. The file of process 0 may stand for all processes."""
    return f"{name}/p{process:05d}.json"


class ContentComparison:
    """Digests of the content that one process saves, for a comparison with the other processes.

    Args:
        digest_name: the digest of the checkpoint.
    """

    def __init__(self, digest_name: str) -> None:
        self._digest = digest_function(digest_name)
        self._parts: list[StagedPart] = []
        self._local: dict[str, str] = {}  # digests of the leaves that each process has for itself

    def add_part(self, part: StagedPart) -> None:
        """Add a checkpointable."""
        self._parts.append(part)

    def add_local(self, part: StagedPart, written: WrittenArrays) -> None:
        """Add the arrays of a part that each process has for itself; `written` are this process's arrays."""
        assert part.snapshot is not None
        for number in part.snapshot.local:
            array, other = written.arrays[number], part.snapshot.compared.get(number)
            if other is None:
                found = sorted((chunk.box, chunk.digests) for chunk in array.chunks)
            else:
                found = sorted((chunk.box, self._digests(chunk)) for chunk in other if chunk.data.nbytes)
            self._local[f"{part.name}/{array.name}"] = self._digest(msgspec.msgpack.encode(found))

    def _digests(self, chunk: ChunkSource) -> str:
        data = chunk.data.fetch() if hasattr(chunk.data, "fetch") else np.asarray(chunk.data)
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return block_digests(flat, BLOCK_BYTES, self._digest)

    def of_own_values(self, parts: Sequence[StagedPart]) -> dict[str, str]:
        """Return the digests of the values that each process has for itself, by checkpointable."""
        return {part.name: self._digest(part.same) for part in parts if part.same is not None}

    def digest(self) -> str:
        """Return one digest of all content."""
        return self._digest(msgspec.msgpack.encode(self._all(detailed=False)))

    def encoded(self) -> bytes:
        """Return the digests of all items, for `refuse_differences`."""
        return msgspec.msgpack.encode(self._all(detailed=True))

    def _all(self, *, detailed: bool) -> list[tuple[str, str]]:
        found = [each for part in self._parts for each in self._of_part(part, detailed=detailed)]
        return found + [(f"leaf {name!r}: its values", digest) for name, digest in self._local.items()]

    def _of_part(self, part: StagedPart, *, detailed: bool) -> Iterator[tuple[str, str]]:
        label = f"checkpointable {part.name!r}"
        yield f"{label}: its kind", part.kind
        if part.value is not None and part.same is None:
            yield f"{label}: its value", self._digest(part.value)
        if part.snapshot is None:
            return
        local = set(part.snapshot.local)
        forms = {
            array.name: (array.shape, str(array.dtype), number in local)
            for number, array in enumerate(part.snapshot.arrays)
        }
        record = part.snapshot.record
        if not detailed:
            yield label, self._digest(msgspec.msgpack.encode((record.containers, record.leaves, forms)))
            return
        yield f"{label}: its structure", self._digest(msgspec.msgpack.encode(record.containers))
        for name, leaf in record.leaves.items():
            yield f"leaf {f'{part.name}/{name}'!r}", self._digest(msgspec.msgpack.encode((leaf, forms.get(name))))


def refuse_differences(values: Sequence[bytes]) -> bytes:
    """Raise an error that names the differences, in the primary process.

    Raises:
        MismatchError: always.
    """
    found = [dict(msgspec.msgpack.decode(value, type=list[tuple[str, str]])) for value in values]
    lines = []
    for label in {label: None for each in found for label in each}:
        digests = [each.get(label) for each in found]
        if len(set(digests)) > 1:
            lines.append(f"{label}: {_describe_difference(digests)}")
    shown = "; ".join(lines[:MAX_SHOWN]) or "a value that changes between two reads"
    more = f"; and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
    raise MismatchError(
        f"the processes of this job do not save the same values: {shown}{more}. A value that each process has for "
        "itself must be equal in all of them; otherwise make one array of it that spans the devices of all processes"
    )


def _describe_difference(digests: Sequence[str | None]) -> str:
    most = Counter(digests).most_common(1)[0][0]
    others = [number for number, digest in enumerate(digests) if digest != most]
    lacking = [number for number in others if digests[number] is None]
    named = ", ".join(map(str, others[:MAX_SHOWN])) + (
        f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
    )
    who = f"process {named}" if len(others) == 1 else f"processes {named}"
    have = "has" if len(others) == 1 else "have"
    return f"{who} {have} none, unlike most" if lacking == others else f"{who} {have} another value than most"
