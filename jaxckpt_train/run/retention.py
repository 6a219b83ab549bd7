"""Retention: deletes steps that no policy keeps, on a thread of its own, never visible half-way.

A link in the run's directory that stands for its best step, for whoever exports that.

Which steps of a run are about to be deleted, and which of these wait for the disk to keep what replaces them.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from jaxckpt_train._validation import Mode, stated_mode
from jaxckpt_train.errors import CheckpointError, SettingsError, StorageError
from jaxckpt_train.pending import SLICE_S
from jaxckpt_train.policies.context import metric_name, rank_checkpoints
from jaxckpt_train.run.catalog import hidden_name, shown_name
from jaxckpt_train.run.entry import Entry, parse_step_name
from jaxckpt_train.store.backends.base import Backend, Linking, make_durable, sync_directory
from jaxckpt_train.store.backends.base import Entry as StoredEntry
from jaxckpt_train.store.manifest import COMMIT_NAME
from jaxckpt_train.store.threads import Latch

_log = logging.getLogger("jaxckpt_train")
_THREAD = "jaxckpt-retention"
_MOMENT_S = 0.2


class PendingDeletions:
    """The names of their directories.

    None of them is listed. Those that wait stay for a while, and for ever if the disk does not keep what replaces them:
    they can be restored and pinned, and are then kept again.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._waiting: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, names: Collection[str], *, wait: bool) -> None:
        """They are about to be deleted; `wait`: something else has to be on the disk before."""
        self._names.update(names)
        self._waiting.update(names if wait else ())

    def discard(self, names: Iterable[str]) -> None:
        """They are gone, or kept again."""
        found = [*names]
        self._names.difference_update(found)
        self._waiting.difference_update(found)

    def is_going(self, name: str) -> bool:
        """Whether it may be gone at any moment."""
        return name in self._names and name not in self._waiting

    def let_go(self, names: Sequence[str], kept: Collection[str]) -> list[str]:
        """These have waited: those of them that somebody has kept again do not go, the others do now."""
        self.discard(name for name in names if name in kept)
        going = [name for name in names if name not in kept]
        self._names.update(going)  # somebody may have kept them for a while only
        self._waiting.difference_update(going)
        return going


@dataclasses.dataclass(frozen=True)
class BestLink:
    """What the link stands for.

    Args:
        metric: the metric that says which step is better.
        mode: "min": lower is better; "max": higher is better; None: "min", and refused for a metric such as "accuracy".
        name: of the link, in the run's directory.

    Raises:
        SettingsError: an argument is wrong, or the name is one that something else has, or may have.
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
    """Keeps the link up to date, for the owner of the run. A disk that refuses it, or has none, is told once.

    Args:
        backend, directory: where the run is.
        link: what it stands for; None: there is none.
    """

    def __init__(self, backend: Backend | Linking, directory: str, link: BestLink | None) -> None:
        self._backend, self._directory, self._link = backend, directory, link
        self._guard = threading.Lock()
        self._begun, self._newest = itertools.count(1), 0
        self._target: str | None = None
        self._is_known = self._is_told = False

    def update(self, newest: Callable[[], Sequence[Entry]]) -> None:
        """Have it stand for the best of the steps that there are; where none has the metric, there is no link."""
        if self._link is None:
            return
        number = next(self._begun)
        entries = newest()
        ranked = rank_checkpoints([entry.info() for entry in entries], self._link.metric, self._link.mode or "min")
        target = next((entry.name for entry in entries if ranked and entry.step == ranked[0].step), None)
        with self._guard:
            if number < self._newest:  # another thread has looked later, and was faster
                return
            self._newest = number
            if self._is_known and target == self._target:
                return
            try:
                self._point(target)
            except StorageError as error:
                self._is_known = False
                self._tell(str(error))
            else:
                self._target, self._is_known = target, True

    def _point(self, target: str | None) -> None:
        assert self._link is not None
        if isinstance(self._backend, Linking):
            self._backend.point(f"{self._directory}/{self._link.name}", target)
        else:
            self._tell(f"{self._directory}: this storage has no links")

    def _tell(self, problem: str) -> None:
        level = logging.INFO if self._is_told else logging.WARNING
        self._is_told = True
        _log.log(level, "no link to the best step: %s", problem)


@dataclasses.dataclass
class _Batch:
    """Steps that were to be deleted together, and which others must be on the disk before they go."""

    names: list[str]
    instead: list[str]
    has_waited: bool = False

    def replace(self, lost: Collection[str], by: Sequence[str]) -> None:
        """Wait for what has replaced those that are `lost`, rather than for them."""
        if not set(lost).isdisjoint(self.instead):
            self.instead = list(dict.fromkeys([*(name for name in self.instead if name not in lost), *by]))

    def has_step_of(self, name: str) -> bool:
        """Whether another generation of the same step is among them, which that one replaces."""
        parsed = parse_step_name(name)
        return parsed is not None and any((parse_step_name(each) or (None,))[0] == parsed[0] for each in self.names)


class Told(Protocol):
    """Who is told what becomes of steps, by the names of their directories."""

    def about_to_go(self, names: Sequence[str]) -> list[str]:
        """These have waited, perhaps long: which of them still may go."""

    def held_up(self, names: Sequence[str]) -> None:
        """These could not go when they should: they wait, and are asked for before the next try."""

    def deleted(self, name: str) -> None:
        """It is not listed any more."""

    def refused(self, name: str) -> None:
        """The disk refuses to keep it."""


class Deleter:
    """Deletes step directories one after the other. A failing deletion warns and is tried again with the next one.

    Args:
        backend: where.
        directory: of the run.
        told: a weak reference to whoever is told what becomes of the steps.
        check: raises if the directory is another process's by now.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        told: Callable[[], Told | None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._directory, self._told, self._check = backend, directory, told, check
        # A queue that garbage collection may put into at any moment: dropped managers say so by a finalizer.
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._retry: dict[str, None] = {}  # in their order
        self._waiting: list[_Batch] = []  # for the disk
        self._unsynced: set[str] = set()
        self._warned: set[tuple[str, int | None]] = set()
        self._guard = threading.RLock()
        self._worker: threading.Thread | None = None
        self._stays = False

    @property
    def is_here(self) -> bool:
        """Whether this very thread is the one that deletes."""
        return self._worker is threading.current_thread()

    def delete(self, names: Sequence[str], *, instead: Sequence[str] = ()) -> None:
        """Delete step directories soon; each stops being listed before its first byte goes.

        Args:
            names: of the directories.
            instead: steps that may have been saved without being synced: they are now, before the others go. A power
                cut would else find none, since names are often on the disk before the data are.
        """
        if names:
            self._jobs.put(functools.partial(self._delete, names, instead))
            self._ensure_worker()

    def _ensure_worker(self) -> None:
        """Have somebody who does what is left: a thread, or the caller if the system has none for it."""
        if self._worker is not None or self._jobs.empty():
            return
        try:
            threading.Thread(target=self._work, name=_THREAD, daemon=True).start()
        except RuntimeError:
            self._work(stays=False)

    def _has_work(self) -> bool:
        """Whether something is left to do, or being done: a worker is known before it takes its first job."""
        with self._guard:
            return self._worker is not None or not self._jobs.empty()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to delete; False if that took too long."""
        if not self._has_work():
            return True
        done = Latch()
        self._jobs.put(done.open)
        self._ensure_worker()
        return self._is_reached(done, timeout_s)

    def _is_reached(self, done: Latch, timeout_s: float | None, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a job of one's own, or until none is left: an interrupt may have lost it to a caller that worked."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not done.wait(min(SLICE_S, max(0.0, end - time.monotonic()))):
            if not self._has_work():
                return True
            if time.monotonic() >= end or until():
                return False
        return True

    def close(
        self,
        then: Callable[[], object] = lambda: None,
        timeout_s: float | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Finish what is under way, call `then` and end the thread. Not to be called on that thread itself.

        Returns:
            False: that was not done within `timeout_s` seconds, or before `until` became true, and goes on.
        """
        done, last = Latch(), list[threading.Thread]()

        def reached() -> None:
            last.append(threading.current_thread())
            try:
                then()
            finally:
                done.open()

        self._jobs.put(reached)
        self._jobs.put(self._end_when_done)
        self._ensure_worker()  # also where nothing is left to delete: `then` may ask a disk that does not answer
        if not self._is_reached(done, timeout_s, until):
            return False
        for worker in last:
            if worker.name == _THREAD:  # else it is a caller who had no thread for it
                worker.join()
        return True

    def end(self, then: Callable[[], object] | None) -> None:
        """As `close`, but whoever calls it may be the garbage collector in the midst of all: `then` has a thread.

        It is waited for a moment only, and not at all if something is left to do before; None: nothing is to be called.
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
        """Work off the jobs, one thread at a time; one that fails ends its thread, and the next goes on."""
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
            self._tell_held_up(batch.names)
            return
        self._take_replaced()
        hidden = self._hide_all()
        if hidden and not self._is_hiding_durable():
            self._retry.update(dict.fromkeys(hidden))
            return
        for name in hidden:
            self._remove(name)

    def _may_go(self, batch: _Batch) -> bool:
        """Whether it may go now, without what somebody has pinned or restored while it waited.

        Nobody knows of a run that was dropped: it is for the next owner to decide.
        """
        told = self._told()  # which is not held while they are deleted: perhaps it is about to be dropped
        try:
            batch.names = [] if told is None else told.about_to_go(batch.names)
        except Exception as error:  # noqa: BLE001  # a thread's edge: of a policy, which every save asks as well
            _log.warning("deleting old steps waits, since it cannot be told which are kept: %r", error)
            return False
        return True

    def _hide_all(self) -> list[str]:
        """Hide what is to go, as long as the directory is this process's: another may own it after a long wait."""
        hidden, pending_deletions = [], deque(self._retry)
        self._retry = {}
        while pending_deletions and self._is_allowed():
            found = self._hide(pending_deletions.popleft())
            hidden += [] if found is None else [found]
        self._wait_again([*pending_deletions])
        return hidden

    def _add(self, batch: _Batch) -> None:
        """What others wait for and is now to go itself, or is gone, has been replaced by what this batch waits for.

        So has what the disk refused to keep, but for what has replaced another generation of its own step. Each batch
        comes after a commit, whose step it waits for unless that is on the disk.
        """
        lost = {*batch.names, *self._lost()}
        for other in self._waiting:
            refused = {name for name in tuple(self._unsynced) if not other.has_step_of(name)}
            other.replace(lost | refused, batch.instead)
        self._waiting.append(batch)

    def _lost(self) -> set[str]:
        """What is waited for and is not there any more: somebody has removed it by hand."""
        wanted = {name for batch in self._waiting for name in batch.instead}
        there = names_in(self._backend, self._directory) if wanted else None
        return set() if there is None else wanted - there

    def _take_replaced(self) -> None:
        """Let those go that may, as what replaces them is on the disk now."""
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
            self._check()
        except CheckpointError as error:
            _log.warning("deleting old steps waits: %s", error)
            return False
        return True

    def make_durable(self, name: str) -> bool:
        """Bring a step to the disk; False: it refuses, or has done so once.

        The system may have forgotten then what it could not write, so that a second sync succeeds and proves nothing.
        """
        if name in self._unsynced:
            return False
        try:
            make_durable(self._backend, f"{self._directory}/{name}")
        except StorageError as error:
            _log.warning("%s could not be synced, so what it replaces stays: %s", name, error)
            self._unsynced.add(name)
            told = self._told()
            if told is not None:
                told.refused(name)
            return False
        return True

    def _hide(self, name: str) -> str | None:
        """Give a step the name under which it is deleted; None: that failed, or nothing is left to delete."""
        hidden = hidden_name(name)
        if name == hidden:
            return hidden
        try:
            self._backend.rename(f"{self._directory}/{name}", f"{self._directory}/{hidden}")
        except StorageError as error:
            if error.errno == errno.EXDEV or (error.errno == errno.EEXIST and self._is_cut(hidden)):
                self._remove_in_place(name, hidden)
                return None
            there = names_in(self._backend, self._directory)
            if there is None or name in there:
                self._warn_of(name, error)
                self._wait_again([name])
                if there is not None and hidden in there:  # what is left of one that had this name stands in its way
                    self._retry[hidden] = None
                return None
            if hidden not in there:
                _log.info("%s is gone already", name)
                hidden = ""
        self._note_deleted(name)
        return hidden or None

    def _note_deleted(self, name: str) -> None:
        self._unsynced.discard(name)
        told = self._told()
        if told is not None:
            told.deleted(name)

    def _remove_in_place(self, name: str, hidden: str) -> None:
        """Delete a step whose directory cannot be renamed, as one of a container's image.

        Its COMMIT gets the hidden name and goes last: by that a later owner knows what it has to remove.
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
        """Whether an owner died while it deleted the step of this hidden name in place."""
        try:
            return StoredEntry(hidden, "file") in self._backend.list(self._directory)
        except StorageError:
            return False

    def _is_hiding_durable(self) -> bool:
        """Sync the new names: a power cut might else bring steps back under the old ones, without all their files."""
        try:
            sync_directory(self._backend, self._directory)
        except StorageError as error:
            _log.warning("deleting old steps waits, since %s could not be synced: %s", self._directory, error)
            return False
        return True

    def _remove(self, hidden: str) -> None:
        try:
            self._backend.remove(f"{self._directory}/{hidden}")
        except StorageError as error:
            self._warn_of(hidden, error)
            self._wait_again([hidden])

    def _warn_of(self, name: str, error: StorageError) -> None:
        """Warn once of what is tried again at each deletion."""
        level = logging.DEBUG if (name, error.errno) in self._warned else logging.WARNING
        self._warned.add((name, error.errno))
        _log.log(level, "deleting %s failed and will be tried again: %s", shown_name(name), error)

    def _wait_again(self, names: Sequence[str]) -> None:
        """Try these again with the next deletion; steps that are still listed are asked for before, and may be kept."""
        listed = [name for name in names if name != hidden_name(name)]
        self._retry.update((name, None) for name in names if name not in listed)
        if listed:
            self._waiting.append(_Batch(listed, [], has_waited=True))
            self._tell_held_up(listed)

    def _tell_held_up(self, names: Sequence[str]) -> None:
        told = self._told()
        if told is not None:
            told.held_up([name for name in names if name != hidden_name(name)])


def names_in(backend: Backend, directory: str) -> set[str] | None:
    """What is in a run directory; None: the disk does not tell."""
    try:
        return {entry.name for entry in backend.list(directory)}
    except StorageError:
        return None
