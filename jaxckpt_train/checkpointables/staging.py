"""Stage checkpointables: take their values on the caller's thread, so that later changes of them do not matter."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxckpt_train._validation import named
from jaxckpt_train.checkpointables.base import NOTHING, Staged
from jaxckpt_train.checkpointables.handlers import handler_of
from jaxckpt_train.errors import CheckpointTimeoutError, NonFiniteError, SettingsError, UnsupportedLeafError
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave, ProgressTracker
from jaxckpt_train.pytree.copies import Busy, TransferBudget
from jaxckpt_train.pytree.identity import LastSaved
from jaxckpt_train.pytree.leaves import refuse_too_deep, refused_if_too_deep
from jaxckpt_train.pytree.partition import JobPartition
from jaxckpt_train.pytree.snapshot import Snapshot, snapshot
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.manifest import digest_function, encode_value, is_plain_name, plain_name_rule

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


def first_of(items: Sequence[str], separator: str = ",") -> str:
    """Return the first few items for a message, and how many more there are."""
    more = f"{separator} and {len(items) - 5} more" if len(items) > 5 else ""
    return f"{separator} ".join(items[:5]) + more


class OwnFiles:
    """Lets an object write its own files; it is `busy` meanwhile, since this may take long."""

    def __init__(self, write_files: Callable[[Path], None]) -> None:
        self._write_files, self.busy = write_files, Busy()

    def write(self, folder: Path) -> None:
        """Write the files into the folder."""
        with self.busy:
            self._write_files(folder)


@dataclasses.dataclass(frozen=True)
class StagedPart:
    """One staged checkpointable, which later changes by its owner do not affect. `same` is as in `Staged`."""

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
    """The duration of each phase of a save in seconds, and the number of bytes that this process wrote and took over.

    `snapshot_s` and `stage_s` (checkpointables other than pytrees) blocked the caller; the other phases did not. During
    `device_wait_s` the devices computed updates that JAX had queued: training time, which no other phase includes.
    """

    device_wait_s: float = 0.0
    snapshot_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    bytes: int = 0
    taken_bytes: int = 0


def stage_all(
    checkpointables: Mapping[str, Any],
    times: SaveTimes,
    settings: StoreSettings,
    partition: JobPartition | None = None,
    last: Callable[[str], LastSaved | None] | None = None,
) -> list[StagedPart]:
    """Stage all checkpointables by name as they are now. `wait_until_taken` waits until all of them are safe.

    `partition`: in a multi-process job, which parts of the arrays this process saves. `last`: what was saved last of
    each checkpointable, if the next save will ask.
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
                parts.append(_stage(name, value, times, settings, ahead, partition, last))
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
    last: Callable[[str], LastSaved | None] | None,
) -> StagedPart:
    started = time.perf_counter()
    taken = value if isinstance(value, StagedValue) else take(value)
    kind, staged = taken.kind, taken.staged
    if staged.tree is not value:  # the search for a handler has already checked `value`
        refuse_too_deep("the tree", staged.tree)
    part = None
    if staged.write_files is not None:
        part = StagedPart(name, kind, own_files=OwnFiles(staged.write_files))
    elif staged.tree is NOTHING:
        same = None if staged.same is NOTHING else encode_value(staged.same)
        part = StagedPart(name, kind, value=encode_value(staged.value), same=same)
    now = time.perf_counter()
    times.stage_s += now - started
    if part is not None:
        return part
    found = snapshot(
        staged.tree,
        settings.snapshot,
        ahead,
        is_guarded=settings.nonfinite != "allow",
        partition=partition,
        colocated=settings.colocated,
        is_tracked=last is not None,
        last=None if last is None else last(name),
    )
    times.device_wait_s += found.device_wait_s
    times.snapshot_s += time.perf_counter() - now - found.device_wait_s
    return StagedPart(name, kind, snapshot=found)


def wait_until_taken(
    parts: Sequence[StagedPart],
    pending: PendingSave[T],
    timeout_s: float | None = None,
    patience_s: float = LAST_PATIENCE_S,
    until: Callable[[], bool] | None = None,
) -> None:
    """Wait until the caller may change the values that `pending` saves.

    Raises CheckpointTimeoutError, and lets the save fail, after the time limit, after `patience_s` seconds without
    progress, or if `until` returned true.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    for part in parts:
        if part.snapshot is not None:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            reason = pending.wait_for(part.snapshot.is_taken, left_s, patience_s, until)
            if reason is not None and _cancel(parts):
                raise CheckpointTimeoutError(
                    f"saving {pending.subject}: {reason}; abandoned before its state was copied"
                )


def _cancel(parts: Sequence[StagedPart]) -> bool:
    """Make the save fail and release the state; return False if the whole state was copied after all."""
    transfers = [part.snapshot.transfers for part in parts if part.snapshot is not None]
    is_cancelled = any(each.cancel() for each in transfers if each is not None)
    if is_cancelled:
        close_parts(parts)
    return is_cancelled


def make_tracker(parts: Sequence[StagedPart]) -> ProgressTracker:
    """Return a progress tracker that excuses waits for computations and for objects that write their own files."""
    busy = [part.own_files.busy for part in parts if part.own_files is not None]
    for taken in (part.snapshot for part in parts if part.snapshot is not None):
        busy += [each.busy for each in (taken.transfers, taken.guard, taken.on_hosts) if each is not None]
    return ProgressTracker(lambda: any(each.is_set() for each in busy))


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
    shown = first_of([f"{leaf!r} ({flaw})" for leaf, flaw in found])
    problem = f"{subject}: {len(found)} {'leaf holds' if len(found) == 1 else 'leaves hold'} nan or inf: {shown}"
    if settings.nonfinite == "warn":
        _log.warning("%s; saved anyway", problem)
        return
    raise NonFiniteError(
        f'{problem}. The state is not saved, because nonfinite is "reject"; earlier checkpoints are unchanged. Find '
        "the first step with these values, for example with jax.config.update('jax_debug_nans', True)",
        tuple(leaf for leaf, _ in found),
    )


def close_parts(parts: Sequence[StagedPart]) -> None:
    """Release the state."""
    for part in parts:
        if part.snapshot is not None:
            part.snapshot.close()
