"""Changes that commands make to a run: which steps `jaxckpt prune` deletes, and the ownership that a change needs.

Needs no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
from collections.abc import Iterator, Mapping, Sequence

from jaxckpt_train.errors import NotACheckpointError, StorageError
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, PreservationPolicy, ask_to_preserve
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry, RollBack, left_behind, newest_generations
from jaxckpt_train.run.history import utc_now
from jaxckpt_train.run.retention import expired_names, replaced
from jaxckpt_train.settings import ObjectStoreSettings
from jaxckpt_train.store.backends.base import Backend

DELETE_GRACE_S = ObjectStoreSettings().delete_grace_s
PATIENCE_S = 7 * 86400.0  # for deletions; a user can interrupt the wait


@contextlib.contextmanager
def owned_run(
    backend: Backend,
    directory: str,
    policy: PreservationPolicy | None = None,
    *,
    may_be_new: bool = False,
    delete_grace_s: float = DELETE_GRACE_S,
) -> Iterator[RunDirectory]:
    """Own a run within the context. On exit, its deletions are finished and the lock is released.

    On an object store, the data of deleted steps stays unless `delete_grace_s` is over by then.

    Raises:
        NotACheckpointError: there is no run in the directory, unless it `may_be_new`.
        DirectoryLockedError, StorageError, CheckpointTimeoutError: as `RunDirectory.own`.
    """
    if not may_be_new and not scan(backend, directory):
        raise NotACheckpointError(f"{directory}: expected a run, found a directory without committed steps")
    run = RunDirectory(backend, directory, policy, utc_now, delete_grace_s=delete_grace_s)
    run.log.tends = True
    try:
        try:
            run.own()
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            advice = (
                f"{error.strerror}. Only the owner of a run deletes or moves steps, and there is no space for its "
                "lock: remove the directory of the oldest step by hand while no job runs, then try again"
            )
            raise StorageError(error.errno, advice, error.filename) from error
        yield run
    finally:
        run.close(PATIENCE_S)


class Pruning:
    """A preservation policy that keeps what one of several policies, by name, keeps, and the steps in `safe`."""

    def __init__(self, policies: Mapping[str, PreservationPolicy]) -> None:
        self.policies, self.safe = dict(policies), dict[int, str]()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """Keep a step if one of the policies keeps it or it is safe."""
        reasons = self.reasons(checkpoints, context=context)
        return [bool(reasons[info.step]) or info.step in self.safe for info in checkpoints]

    def reasons(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> Mapping[int, list[str]]:
        """The names of the policies that keep each step."""
        found: dict[int, list[str]] = {info.step: [] for info in checkpoints}
        for name, policy in self.policies.items():
            flags = ask_to_preserve(policy, checkpoints, context=context)
            for info, keeps in zip(checkpoints, flags, strict=True):
                found[info.step] += [name] if keeps else []
        return found


@dataclasses.dataclass(frozen=True)
class Fate:
    """The decision about one generation of a step: whether it is deleted, and the reasons, at least one."""

    goes: bool
    why: tuple[str, ...]


def current_line(entries: Sequence[Entry], roll_back: RollBack) -> list[Entry]:
    """The intact steps that the run descends from, in the order of the saves, newest last."""
    left = left_behind(entries, roll_back)
    return [entry for entry in entries if entry.damaged is None and entry.name not in left]


def fates(entries: Sequence[Entry], roll_back: RollBack, pruning: Pruning, now: datetime.datetime) -> dict[str, Fate]:
    """The decision about each step that the owner of the run would take, by the name of the step."""
    line, context = current_line(entries, roll_back), DecisionContext(now)
    left, whole = left_behind(entries, roll_back), [entry for entry in entries if entry.damaged is None]
    unkept = expired_names(entries, line, left, pruning, context)
    pending_deletions, _ = replaced(unkept, whole, line)
    newest = newest_generations([entry for entry in line if not entry.is_held])
    lasting = sorted((entry.info() for entry in newest if not entry.temporary), key=lambda info: info.step)
    kept_by, listed = pruning.reasons(lasting, context=context), {entry.step: entry.name for entry in newest}
    always = (
        {} if not newest else {max(newest, key=lambda entry: entry.step).name: "highest", newest[-1].name: "newest"}
    )
    fated = dict[str, Fate]()
    for entry in entries:
        if entry.name in pending_deletions:
            fated[entry.name] = Fate(True, (_why_it_goes(entry, listed),))
            continue
        reasons = [always[entry.name]] if entry.name in always else []
        reasons += _why_it_stays(entry, left)
        if listed.get(entry.step) == entry.name:
            reasons += [pruning.safe[entry.step]] if entry.step in pruning.safe else []
            reasons += kept_by.get(entry.step, [])
        fated[entry.name] = Fate(False, tuple(reasons) or ("the disk refused to sync the step that replaces it",))
    return fated


def _why_it_goes(entry: Entry, listed: Mapping[int, str]) -> str:
    instead = listed.get(entry.step, entry.name)
    if instead != entry.name:
        return f"saved again as {instead}"
    return "temporary, and a later step is committed" if entry.temporary else "no policy keeps it"


def _why_it_stays(entry: Entry, left: frozenset[str]) -> list[str]:
    """The reasons other than policies."""
    found = {
        "set aside as damaged": entry.damaged is not None,
        "its manifest or its notes cannot be read": entry.is_held,
        "pinned": entry.pinned,
        "left behind by a roll-back, until its step is saved again": entry.name in left,
    }
    return [reason for reason, applies in found.items() if applies]
