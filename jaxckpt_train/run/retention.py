"""Retention: deletes expired steps on a background thread, and maintains the link to the best step.

A step is renamed before its first file is removed, so that no reader sees a partly deleted step. Steps that replace it
are synced before.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Protocol

from jaxckpt_train._validation import Mode, stated_mode
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.pending import SLICE_S
from jaxckpt_train.policies.context import (
    DecisionContext,
    PreservationPolicy,
    metric_name,
    rank_checkpoints,
    steps_to_delete,
)
from jaxckpt_train.run.entry import Entry, hidden_name, newest_generations, parse_step_name, shown_name
from jaxckpt_train.store.backends.base import Backend, Linking, make_durable, sync_directory
from jaxckpt_train.store.backends.base import Entry as StoredEntry
from jaxckpt_train.store.manifest import COMMIT_NAME
from jaxckpt_train.store.threads import Latch

_log = logging.getLogger("jaxckpt_train")
_THREAD = "jaxckpt-retention"
_MOMENT_S = 0.2


def expired_names(
    entries: Sequence[Entry],
    line: Sequence[Entry],
    left: Set[str],
    policy: PreservationPolicy | None,
    context: DecisionContext,
) -> set[str]:
    """The names of the steps that may be deleted. The newest step of the branch is never among them.

    A step that a roll-back left behind does not count for the policy; it expires when the run has saved the same step
    again, unless it is pinned. Damaged steps are never deleted, held steps not until their state is known.
    """
    newest = newest_generations([entry for entry in line if not entry.is_held])
    saved, steps = {entry.step for entry in newest}, _steps_to_delete(newest, policy, context)
    unkept = {entry.name for entry in entries if entry.step in saved} - {entry.name for entry in newest}
    unkept -= {entry.name for entry in entries if entry.pinned and entry.name in left}
    unkept -= {entry.name for entry in entries if entry.damaged is not None or entry.is_held}
    unkept |= {entry.name for entry in newest if entry.step in steps}
    return unkept - {entry.name for entry in newest[-1:]}


def _steps_to_delete(newest: Sequence[Entry], policy: PreservationPolicy | None, context: DecisionContext) -> Set[int]:
    if policy is None:
        return {entry.step for entry in newest[:-1] if entry.temporary and not entry.pinned}
    return steps_to_delete([entry.info() for entry in newest], policy, context=context)


def replaced(
    unkept: Set[str], whole: Sequence[Entry], line: Sequence[Entry], *, is_durable: bool
) -> tuple[set[str], list[str]]:
    """The expired steps that may be deleted now, and the steps that must be on the disk before, newest last.

    A step is not deleted if the disk has refused to sync the step that replaces it. `whole` has all intact generations,
    `line` those of the current branch, and `is_durable` says whether the newest step is on the disk already.
    """
    newest = [entry for entry in line if not entry.is_held][-1:]
    if not is_durable and any(entry.is_unsynced for entry in newest):
        return set(), []
    kept = [entry for entry in whole if entry.name not in unkept and not entry.is_held]
    doubtful = {entry.step for entry in kept if entry.is_unsynced}
    pending_deletions = {*unkept} - {entry.name for entry in whole if entry.step in doubtful}
    steps, names = {entry.step for entry in whole if entry.name in pending_deletions}, [entry.name for entry in newest]
    others = [entry.name for entry in whole if entry.step in steps and entry.name not in {*pending_deletions, *names}]
    return pending_deletions, [*others, *([] if is_durable else names)]


class PendingDeletions:
    """The names of the step directories that are about to be deleted. They are no longer listed.

    Some of them wait, perhaps for ever, until the steps that replace them are on the disk. While they wait, they can be
    restored and pinned, and are then kept again.
    """

    def __init__(self) -> None:
        self._waits: dict[str, bool] = {}  # by name

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waits))

    def __contains__(self, name: str) -> bool:
        return name in self._waits

    def add(self, names: Iterable[str], *, wait: bool) -> None:
        """Add names; `wait`: other steps have to be on the disk before the deletion."""
        for name in names:
            self._waits[name] = wait or self._waits.get(name, False)

    def discard(self, names: Iterable[str]) -> None:
        """Remove names that are deleted, or kept again."""
        for name in names:
            self._waits.pop(name, None)

    def is_going(self, name: str) -> bool:
        """Whether the directory may disappear at any moment."""
        return self._waits.get(name) is False

    def confirm(self, names: Sequence[str], kept: Collection[str]) -> list[str]:
        """End the wait of these names: discard those in `kept`, and return the others, which are deleted now."""
        self.discard(name for name in names if name in kept)
        going = [name for name in names if name not in kept]
        self._waits |= dict.fromkeys(going, False)  # a name may have been discarded in between
        return going


@dataclasses.dataclass
class _Batch:
    """Steps to delete together, and the steps that must be on the disk before."""

    names: list[str]
    instead: list[str]
    has_waited: bool = False

    def has_step_of(self, name: str) -> bool:
        """Whether another generation of the same step is in this batch."""
        parsed = parse_step_name(name)
        return parsed is not None and any((parse_step_name(each) or (None,))[0] == parsed[0] for each in self.names)


class DeletionListener(Protocol):
    """Receives the progress of deletions, by the names of the directories."""

    def confirm_deletions(self, names: Sequence[str]) -> list[str]:
        """Return those of these names, which have waited, that are still to be deleted."""

    def deletions_delayed(self, names: Sequence[str]) -> None:
        """These could not be deleted now. They wait; `confirm_deletions` is called before the next attempt."""

    def deleted(self, name: str) -> None:
        """The step is no longer listed."""

    def refused(self, name: str) -> None:
        """The disk refuses to sync the step."""


class Deleter:
    """Deletes step directories on one thread. A failed deletion warns and is tried again with the next one.

    `listener` is a weak reference; `check` raises if another process owns the directory.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        listener: Callable[[], DeletionListener | None],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._backend, self._directory, self._listener, self._check = backend, directory, listener, check
        # Garbage collection may put into a SimpleQueue at any moment: finalizers of dropped managers do.
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._retry: dict[str, None] = {}  # ordered
        self._waiting: list[_Batch] = []  # until the steps that replace them are synced
        self._unsynced: set[str] = set()
        self._warned: set[tuple[str, int | None]] = set()
        self._guard = threading.RLock()
        self._worker: threading.Thread | None = None
        self._stays = False

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the deleting thread."""
        return self._worker is threading.current_thread()

    def delete(self, names: Sequence[str], *, instead: Sequence[str] = ()) -> None:
        """Delete step directories in the background; each stops being listed before its first file is removed.

        Steps in `instead` may not be synced yet, and are synced before. Otherwise a power cut could leave neither,
        since the system often writes names before data.
        """
        if names:
            self._jobs.put(functools.partial(self._delete, names, instead))
            self._ensure_worker()

    def _ensure_worker(self) -> None:
        """Make sure that the jobs are done: by a thread, or by the caller if the system cannot start one."""
        if self._worker is not None or self._jobs.empty():
            return
        try:
            threading.Thread(target=self._work, name=_THREAD, daemon=True).start()
        except RuntimeError:
            self._work(stays=False)

    def _has_work(self) -> bool:
        """Whether a job is left or running: a worker is registered before it takes its first job."""
        with self._guard:
            return self._worker is not None or not self._jobs.empty()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all deletions are done; False: they took too long."""
        if not self._has_work():
            return True
        done = Latch()
        self._jobs.put(done.open)
        self._ensure_worker()
        return self._is_reached(done, timeout_s)

    def _is_reached(self, done: Latch, timeout_s: float | None, until: Callable[[], bool] | None = None) -> bool:
        """Wait for `done`, or until no job is left: an interrupt may have dropped the job that sets it."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not done.wait(min(SLICE_S, max(0.0, end - time.monotonic()))):
            if not self._has_work():
                return True
            if time.monotonic() >= end or (until is not None and until()):
                return False
        return True

    def close(
        self,
        then: Callable[[], object] | None = None,
        timeout_s: float | None = None,
        until: Callable[[], bool] | None = None,
    ) -> bool:
        """Finish all jobs, call `then`, and end the thread; return whether this was done in time. If not, it continues.

        Must not be called on that thread.
        """
        done, last = Latch(), list[threading.Thread]()

        def reached() -> None:
            last.append(threading.current_thread())
            try:
                if then is not None:
                    then()
            finally:
                done.open()

        self._jobs.put(reached)
        self._jobs.put(self._end_when_done)
        self._ensure_worker()  # even without deletions: `then` may access a disk that does not answer
        if not self._is_reached(done, timeout_s, until):
            return False
        for worker in last:
            if worker.name == _THREAD:  # else a caller did the work, as no thread could be started
                worker.join()
        return True

    def end(self, then: Callable[[], object] | None) -> None:
        """Like `close`, for garbage collection, which may call it at any moment: `then` runs on the thread.

        Waits only briefly, and not at all if other jobs are left. With `then` None, only ends the thread.
        """
        done, is_busy = Latch(), self._has_work()
        if then is None and not is_busy:
            return
        for job in (then, done.open, self._end_when_done):
            if job is not None:
                self._jobs.put(job)
        self._ensure_worker()
        if not is_busy:
            done.wait(_MOMENT_S)

    def _end_when_done(self) -> None:
        self._stays = False

    def _work(self, stays: bool = True) -> None:
        """Do the jobs, on one thread at a time. A job that fails ends its thread, and the next thread continues."""
        here = threading.current_thread()
        if self._worker is not None:
            return
        try:
            with self._guard:
                if self._worker is None:
                    self._worker, self._stays = here, stays and not self._jobs.empty()
            while self._worker is here and (job := self._next()) is not None:
                job()
        finally:
            with self._guard:
                if self._worker is here:
                    self._worker = None
            self._ensure_worker()

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(block=self._stays)
        except queue.Empty:
            return None

    def _delete(self, names: Sequence[str], instead: Sequence[str]) -> None:
        batch = _Batch(list(names), list(instead), has_waited=bool(instead))
        self._add(batch)
        if not self._is_allowed():
            batch.has_waited = True
            self._report_delayed(batch.names)
            return
        self._take_replaced()
        hidden = self._hide_all()
        if not hidden:
            return
        try:
            # Otherwise a power cut could bring back a step under its old name with files missing.
            sync_directory(self._backend, self._directory)
        except StorageError as error:
            _log.warning("deleting old steps waits, since %s could not be synced: %s", self._directory, error)
            self._retry.update(dict.fromkeys(hidden))
            return
        for name in hidden:
            try:
                self._backend.remove(f"{self._directory}/{name}")
            except StorageError as error:
                self._warn_of(name, error)
                self._wait_again([name])

    def _may_go(self, batch: _Batch) -> bool:
        """Whether the batch may be deleted now, after removing steps that were pinned or restored meanwhile.

        If the run was dropped, nothing is deleted: the next owner decides.
        """
        listener = self._listener()  # no strong reference during the deletions: the run may be dropped meanwhile
        try:
            batch.names = [] if listener is None else listener.confirm_deletions(batch.names)
        except Exception as error:  # noqa: BLE001  # a user's policy failed; every save asks it again and raises
            _log.warning("old steps are not deleted yet, because the preservation policy raised an error: %r", error)
            return False
        return True

    def _hide_all(self) -> list[str]:
        """Rename the directories to delete, while this process owns the run: a long wait may end the ownership."""
        hidden, pending_deletions = [], deque(self._retry)
        self._retry = {}
        while pending_deletions and self._is_allowed():
            found = self._hide(pending_deletions.popleft())
            hidden += [] if found is None else [found]
        self._wait_again([*pending_deletions])
        return hidden

    def _add(self, batch: _Batch) -> None:
        """Add a batch, and update the others: steps that they wait for may be deleted, or refused by the disk.

        They then wait for the steps of the new batch instead, except if a refused step replaces another generation of
        the same step. Each batch follows a commit, and waits for the committed step unless that is on the disk
        already.
        """
        for other in self._waiting:
            lost = {*batch.names, *(name for name in tuple(self._unsynced) if not other.has_step_of(name))}
            if not lost.isdisjoint(other.instead):
                rest = [name for name in other.instead if name not in lost]
                other.instead = list(dict.fromkeys([*rest, *batch.instead]))
        self._waiting.append(batch)

    def _take_replaced(self) -> None:
        """Release the batches whose replacements are on the disk now."""
        wanted = dict.fromkeys(name for batch in self._waiting for name in batch.instead)
        durable = {name for name in wanted if self.make_durable(name)}
        for batch in self._waiting:
            batch.instead = [name for name in batch.instead if name not in durable]
        for batch in [batch for batch in self._waiting if not batch.instead]:
            if not batch.has_waited or self._may_go(batch):
                self._waiting.remove(batch)
                self._retry.update(dict.fromkeys(batch.names))

    def _is_allowed(self) -> bool:
        try:
            if self._check is not None:
                self._check()
        except CheckpointError as error:
            _log.warning("old steps are not deleted yet: %s", error)
            return False
        return True

    def make_durable(self, name: str) -> bool:
        """Sync a step; False: the disk refuses, or has refused before.

        After a failed sync, the system may forget what it could not write, so that a second sync proves nothing.
        """
        if name in self._unsynced:
            return False
        try:
            make_durable(self._backend, f"{self._directory}/{name}")
        except StorageError as error:
            _log.warning("%s could not be synced, so the steps that it replaces are kept: %s", name, error)
            self._unsynced.add(name)
            listener = self._listener()
            if listener is not None:
                listener.refused(name)
            return False
        return True

    def _hide(self, name: str) -> str | None:
        """Rename a step for its deletion; None: that failed, or nothing is left to delete."""
        hidden = hidden_name(name)
        if name == hidden:
            return hidden
        try:
            self._backend.rename(f"{self._directory}/{name}", f"{self._directory}/{hidden}")
        except StorageError as error:
            if error.errno == errno.EXDEV or (error.errno == errno.EEXIST and self._is_cut(hidden)):
                self._remove_in_place(name, hidden)
                return None
            try:
                there = {entry.name for entry in self._backend.list(self._directory)}
            except StorageError:
                there = {name}  # as far as is known
            if name in there:
                self._warn_of(name, error)
                self._wait_again([name])
                if hidden in there:  # a half-deleted step blocks the name: remove it first
                    self._retry[hidden] = None
                return None
            if hidden not in there:
                _log.info("%s is gone already", name)
                hidden = ""
        self._note_deleted(name)
        return hidden or None

    def _note_deleted(self, name: str) -> None:
        self._unsynced.discard(name)
        listener = self._listener()
        if listener is not None:
            listener.deleted(name)

    def _remove_in_place(self, name: str, hidden: str) -> None:
        """Delete a step whose directory cannot be renamed, such as a directory from a container image.

        Its COMMIT gets the hidden name and is removed last, so that a later owner can finish the deletion.
        """
        path, marker = f"{self._directory}/{name}", f"{self._directory}/{hidden}"
        try:
            if any(entry.name == COMMIT_NAME for entry in self._backend.list(path)):
                self._backend.rename(f"{path}/{COMMIT_NAME}", marker)
                sync_directory(self._backend, self._directory)
                sync_directory(self._backend, path)
            self._backend.remove(path)
            sync_directory(self._backend, self._directory)
            self._backend.remove(marker)
        except StorageError as error:
            self._warn_of(name, error)
            self._wait_again([name])
        else:
            self._note_deleted(name)

    def _is_cut(self, hidden: str) -> bool:
        """Whether an owner died while it deleted this step in place."""
        try:
            return StoredEntry(hidden, "file") in self._backend.list(self._directory)
        except StorageError:
            return False

    def _warn_of(self, name: str, error: StorageError) -> None:
        """Warn once about a failure that is tried again at each deletion."""
        level = logging.DEBUG if (name, error.errno) in self._warned else logging.WARNING
        self._warned.add((name, error.errno))
        _log.log(level, "deleting %s failed and will be tried again: %s", shown_name(name), error)

    def _wait_again(self, names: Sequence[str]) -> None:
        """Try again with the next deletion. Names that are still listed are checked again, since they may be kept."""
        listed = [name for name in names if name != hidden_name(name)]
        self._retry.update((name, None) for name in names if name not in listed)
        if listed:
            self._waiting.append(_Batch(listed, [], has_waited=True))
            self._report_delayed(listed)

    def _report_delayed(self, names: Sequence[str]) -> None:
        listener = self._listener()
        if listener is not None:
            listener.deletions_delayed([name for name in names if name != hidden_name(name)])


@dataclasses.dataclass(frozen=True)
class BestLink:
    """The link to the best step of a run.

    Args:
        metric: the metric that ranks the steps.
        mode: "min": lower is better; "max": higher is better; None: "min", but an error for a metric such as
            "accuracy".
        name: the name of the link, in the run directory.

    Raises:
        SettingsError: an argument is wrong, or the name may conflict with another file.
    """

    metric: str
    mode: Mode | None = None
    name: str = "best"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", metric_name("BestLink.metric", self.metric))
        object.__setattr__(self, "mode", stated_mode("BestLink.mode", self.mode, self.metric))
        name = self.name
        is_plain = isinstance(name, str) and name.isidentifier() and name.isascii()
        if not is_plain or parse_step_name(name) is not None:
            raise SettingsError(f'BestLink.name: expected a plain name such as "best", found {name!r}')


class LinkToBest:
    """Updates the link to the best step, for the owner. Warns once if the storage refuses or has no links."""

    def __init__(self, backend: Backend | Linking, directory: str, link: BestLink | None) -> None:
        self._backend, self._directory, self._link = backend, directory, link
        self._guard = threading.Lock()
        self._begun, self._newest = itertools.count(1), 0
        self._target: str | None = None
        self._is_known = self._has_warned = False

    def update(self, newest: Callable[[], Sequence[Entry]]) -> None:
        """Point the link to the best of the current steps; if no step has the metric, remove the link."""
        if self._link is None:
            return
        number = next(self._begun)
        entries = newest()
        ranked = rank_checkpoints([entry.info() for entry in entries], self._link.metric, self._link.mode or "min")
        target = next((entry.name for entry in entries if ranked and entry.step == ranked[0].step), None)
        with self._guard:
            if number < self._newest:  # another thread has newer information
                return
            self._newest = number
            if self._is_known and target == self._target:
                return
            try:
                if not isinstance(self._backend, Linking):
                    raise StorageError(f"{self._directory}: this storage has no links")
                self._backend.point(f"{self._directory}/{self._link.name}", target)
            except StorageError as error:
                level = logging.INFO if self._has_warned else logging.WARNING
                self._is_known, self._has_warned = False, True
                _log.log(level, "no link to the best step: %s", error)
            else:
                self._target, self._is_known = target, True
