"""Retention: deletes expired steps on a background thread, and maintains the link to the best step.

A step is renamed before its first file is removed, so that no reader sees a partly deleted step. Steps that replace it
are synced before. A deletion that has to wait, or that the disk refuses, leaves nothing behind: the step stays in the
list, and the next commit decides anew.

On an object store a step leaves the record of the run first, then its COMMIT goes, and after a grace period for readers
the rest. What is not due when this process ends is found by the next owner.
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
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from jaxckpt_train._validation import Mode, is_url, stated_mode
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.pending import SLICE_S
from jaxckpt_train.policies.context import (
    DecisionContext,
    PreservationPolicy,
    metric_name,
    rank_checkpoints,
    steps_to_delete,
)
from jaxckpt_train.run.entry import Entry, newest_generations, parse_step_name
from jaxckpt_train.store.backends.base import (
    TEMPORARY_PREFIXES,
    Backend,
    Linking,
    make_durable,
    objects_of,
    sync_directory,
)
from jaxckpt_train.store.committed import attempt_paths
from jaxckpt_train.store.manifest import COMMIT_NAME
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.timeouts import report_progress

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


def replaced(unkept: Set[str], whole: Sequence[Entry], line: Sequence[Entry]) -> tuple[set[str], list[str]]:
    """The expired steps that may be deleted, and the steps that must be on the disk before, newest last.

    A step is not deleted if the disk has refused to sync the step that replaces it. `whole` has all intact generations,
    and `line` those of the current branch.
    """
    newest = [entry for entry in line if not entry.is_held][-1:]
    if any(entry.is_unsynced for entry in newest):
        return set(), []
    kept = [entry for entry in whole if entry.name not in unkept]
    doubtful = {entry.step for entry in kept if entry.is_unsynced}
    going = [entry for entry in whole if entry.name in unkept and entry.step not in doubtful]
    if not going:
        return set(), []
    steps = {entry.step for entry in going}
    before = [entry for entry in kept if entry.step in steps and entry not in newest] + newest
    return {entry.name for entry in going}, [entry.name for entry in before if not entry.is_durable]


class Run(Protocol):
    """The run whose steps are deleted."""

    def plan_deletions(self) -> tuple[list[str], list[str]]:
        """The steps to delete now, which are no longer listed, and the steps to sync first; one of the two is empty."""

    def synced(self, name: str, *, is_durable: bool) -> bool:
        """The disk has synced a step, or refused to. Returns whether it has never refused."""

    def deleted(self, name: str) -> None:
        """A step has been deleted."""

    def drop_steps(self, names: Sequence[str]) -> None:
        """Remove steps from the record of a run on an object store."""

    def known_names(self) -> set[str]:
        """The names that no clean-up may remove."""

    def read_past(self) -> None:
        """Read the history of earlier processes."""

    def not_deleted(self, names: Sequence[str]) -> None:
        """These steps could not be deleted now."""


class Deleter:
    """Deletes step directories on one thread.

    `run` is a weak reference; `check` raises if another process owns the directory. `grace_s` is how long the objects
    of a deleted step stay, on an object store.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        run: Callable[[], Run | None],
        check: Callable[[], None] | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self._is_remote, self._grace_s = is_url(directory), grace_s
        self._backend, self._directory, self._run, self._check = backend, directory, run, check
        # Garbage collection may put into a SimpleQueue at any moment: finalizers of dropped managers do.
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._hidden: dict[str, float] = {}  # the names of directories to remove, and from when on
        self._warned: set[tuple[str, int | None]] = set()
        self._guard = threading.RLock()
        self._worker: threading.Thread | None = None
        self._stays = False

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the deleting thread."""
        return self._worker is threading.current_thread()

    def delete(self, names: Sequence[str], hidden: Sequence[str] = ()) -> None:
        """Delete steps and hidden directories in the background, and what the disk has refused to remove before.

        The steps that replace them must be on the disk already. Otherwise a power cut could leave neither, since the
        system often writes names before data.
        """
        if names or hidden or self._has_due():
            self._jobs.put(functools.partial(self._delete, names, hidden))
            self._ensure_worker()

    def _has_due(self) -> bool:
        return any(due_s <= time.monotonic() for due_s in list(self._hidden.values()))

    def remove_due(self) -> None:
        """Remove what has become due, in the background."""
        if self._is_remote and self._has_due():
            self._jobs.put(self._remove_hidden)
            self._ensure_worker()

    def look_back(self) -> None:
        """On an object store: read the history, and find what former owners have left, in the background."""
        if self._is_remote:
            self._jobs.put(self._find_left)
            self._ensure_worker()

    def _find_left(self) -> None:
        if (owned := self._run()) is not None:
            owned.read_past()
        del owned  # the run may be dropped while the storage works
        try:
            listed = {entry.name for entry in self._backend.list(self._directory)}
        except StorageError as error:
            level = logging.DEBUG if error.errno == errno.ENOENT else logging.WARNING
            _log.log(level, "%s: what former owners have left is not removed: %s", self._directory, error)
            return
        run = self._run()
        # The order matters: what was listed before this check cannot be from a later owner.
        if run is not None and self._is_allowed():
            left = {name for name in listed - run.known_names() if parse_step_name(name) is not None}
            left |= {name for name in listed if name.startswith(TEMPORARY_PREFIXES)}
            self._hidden.update(dict.fromkeys(left, time.monotonic() + self._grace_s))

    def delete_expired(self) -> None:
        """Delete the expired steps in the background, once the steps that replace them are on the disk."""
        self._jobs.put(self._delete_expired)
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

    def _delete_expired(self) -> None:
        try:
            names = self.due()
        except Exception as error:  # noqa: BLE001  # a user's policy failed; every save asks it again and raises
            _log.warning("old steps are not deleted yet, because the preservation policy raised an error: %r", error)
            return
        self._delete(names)

    def due(self) -> list[str]:
        """Sync the steps that replace expired ones; return the expired ones to delete, which are no longer listed."""
        names, before = self._plan()
        while before and self._is_allowed():
            for name in before:
                report_progress()
                self.make_durable(name)
            names, before = self._plan()  # without the steps whose replacement the disk refuses to sync
        return names

    def _plan(self) -> tuple[list[str], list[str]]:
        """As `Run.plan_deletions`. If the run was dropped, nothing is deleted: the next owner decides."""
        run = self._run()  # no strong reference during a sync or a deletion: the run may be dropped meanwhile
        return ([], []) if run is None else run.plan_deletions()

    def make_durable(self, name: str) -> bool:
        """Sync a step; False: the disk refuses, or has refused before.

        After a failed sync, the system may forget what it could not write, so that a second sync proves nothing.
        """
        try:
            make_durable(self._backend, f"{self._directory}/{name}")
            is_durable = True
        except StorageError as error:
            _log.warning("%s could not be synced, so the steps that it replaces are kept: %s", name, error)
            is_durable = False
        run = self._run()
        return run is not None and run.synced(name, is_durable=is_durable)

    def _delete(self, names: Sequence[str], hidden: Sequence[str] = ()) -> None:
        self._hidden.update(dict.fromkeys(hidden, time.monotonic() + self._grace_s if self._is_remote else 0.0))
        if self._is_remote:
            self._delete_objects(names)
            return
        left = list(names)
        try:
            for name in names:
                if not self._is_allowed():  # checked for each step: a long wait may end the ownership
                    break
                if self._hide(name):
                    left.remove(name)
        finally:
            self._report_left(left)
        self._remove_hidden()

    def _delete_objects(self, names: Sequence[str]) -> None:
        if names:
            run = self._run()
            if run is None:  # dropped, and nobody else may change the record: the next owner decides
                return
            try:
                run.drop_steps(names)  # only the owner can
            except CheckpointError as error:
                _log.warning("old steps are not deleted yet: %s", error)
                run.not_deleted(names)
                return
        try:
            commits = [f"{self._directory}/{name}/{COMMIT_NAME}" for name in names]
            objects_of(self._backend).remove_objects(commits)
        except StorageError as error:  # they go with the rest
            self._warn_of(names[0], error)
        for name in names:
            self._hidden[name] = time.monotonic() + self._grace_s
            self._report_deleted(name)
        self._remove_hidden()

    def _is_allowed(self) -> bool:
        try:
            if self._check is not None:
                self._check()
        except CheckpointError as error:
            _log.warning("old steps are not deleted yet: %s", error)
            return False
        return True

    def _hide(self, name: str) -> bool:
        """Rename a step for its deletion; False: the disk refuses."""
        path = f"{self._directory}/{name}"
        hidden = next(attempt_paths(path))
        try:
            self._backend.rename(path, hidden)
        except StorageError as error:
            if error.errno == errno.EXDEV:
                return self._remove_in_place(name)
            if self._is_there(name):  # else it was renamed nevertheless, or removed by hand
                self._warn_of(name, error)
                return False
        self._hidden[hidden.rpartition("/")[2]] = 0.0
        self._report_deleted(name)
        return True

    def _is_there(self, name: str) -> bool:
        try:
            return any(entry.name == name for entry in self._backend.list(self._directory))
        except StorageError:
            return True  # as far as is known

    def _remove_in_place(self, name: str) -> bool:
        """Delete a step whose directory cannot be renamed, such as a directory from a container image.

        Without COMMIT, the rest is no step. If it cannot be removed now, it stays.
        """
        path = f"{self._directory}/{name}"
        try:
            self._backend.remove(f"{path}/{COMMIT_NAME}")
            sync_directory(self._backend, path)
        except StorageError as error:
            self._warn_of(name, error)
            return False
        self._report_deleted(name)
        try:
            self._backend.remove(path)
        except StorageError as error:
            _log.warning("%s is deleted, but its files were not removed; remove the directory by hand: %s", name, error)
        return True

    def _remove_hidden(self) -> None:
        """Remove the hidden directories. What the disk refuses is tried again with the next deletion."""
        if not self._has_due() or not self._is_allowed():
            return
        try:
            # Otherwise a power cut could bring back a step under its old name with files missing.
            sync_directory(self._backend, self._directory)
        except StorageError as error:
            _log.warning("deleting old steps waits, since %s could not be synced: %s", self._directory, error)
            return
        for name in [name for name, due_s in self._hidden.items() if due_s <= time.monotonic()]:
            try:
                self._backend.remove(f"{self._directory}/{name}")
            except StorageError as error:
                self._warn_of(name, error)
            else:
                del self._hidden[name]

    def _report_deleted(self, name: str) -> None:
        run = self._run()
        if run is not None:
            run.deleted(name)

    def _report_left(self, names: Sequence[str]) -> None:
        run = self._run()
        if run is not None and names:
            run.not_deleted(names)

    def _warn_of(self, name: str, error: StorageError) -> None:
        """Warn once about a failure that is tried again at each deletion."""
        level = logging.DEBUG if (name, error.errno) in self._warned else logging.WARNING
        self._warned.add((name, error.errno))
        _log.log(level, "deleting %s failed and will be tried again: %s", name, error)


@dataclasses.dataclass(frozen=True)
class BestLink:
    """The link to the best step of a run. On an object store, the record of the run has it: `load` follows it.

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

    def target(self, newest: Sequence[Entry]) -> str | None:
        """The name of the best of these entries; None: no step has the metric."""
        ranked = rank_checkpoints([entry.info() for entry in newest], self.metric, self.mode or "min")
        return next((entry.name for entry in newest if ranked and entry.step == ranked[0].step), None)


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
        target = self._link.target(newest())
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
