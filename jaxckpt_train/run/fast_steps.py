"""The steps of a run on its fast tier: which there are, which are deleted, and how one reaches the slow tier.

The slow tier is the directory of the run. A step of the fast tier is drained by all processes of the job: each copies
what is on its host, and the primary commits the copy as a step of the run, with the same lineage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.distributed.jax_service import coordinator_host
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    StorageError,
    suppress_secondary,
)
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave, ProgressTracker, start_save
from jaxckpt_train.policies.context import SavePolicy
from jaxckpt_train.policies.save import AnySavePolicy, FixedIntervalPolicy, OverheadBudgetPolicy
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry, branch_last, entry_from_manifest, parse_step_name
from jaxckpt_train.run.history import Clock
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.settings import FastTierSettings, StoreSettings
from jaxckpt_train.store.backends.base import is_damage
from jaxckpt_train.store.committed import Committed, folders_of, open_committed
from jaxckpt_train.store.timeouts import time_limited
from jaxckpt_train.store.transaction import Attempt, Transaction, begin
from jaxckpt_train.store.verify import copy_verified, unchanged_files
from jaxckpt_train.tiers.fast_tier import FastTier
from jaxckpt_train.tiers.host_files import LAYOUT_NAME

_log = logging.getLogger("jaxckpt_train")
_Copying = PendingSave[CheckpointMetadata | None]  # None: abandoned
_MOST_DRAINS = 2  # at one time, one of which waits, unless a step must be copied


def fast_policy(settings: FastTierSettings) -> SavePolicy:
    """Which steps are saved to the fast tier."""
    policies = list[SavePolicy]()
    if settings.interval_steps is not None:
        policies.append(FixedIntervalPolicy(settings.interval_steps))
    if settings.max_fraction is not None:
        policies.append(OverheadBudgetPolicy(settings.max_fraction, max_interval_secs=None))
    return policies[0] if len(policies) == 1 else AnySavePolicy(policies or [OverheadBudgetPolicy()])


class FastSaved(msgspec.Struct):
    """The primary's message about a step of the fast tier: the steps to remove, and whether this one is drained."""

    removed: tuple[str, ...]
    drains: bool


class _Found(msgspec.Struct):
    """The steps of the run on its fast tier in the order of the saves, and the names of other directories there.

    Those are steps of another run, and what is left of steps that cannot be used any more.
    """

    entries: tuple[Entry, ...]
    foreign: tuple[str, ...]
    unusable: tuple[str, ...]


class _BegunDrain(msgspec.Struct):
    directory: bytes
    paths: dict[int, list[str]]  # what each process copies
    before: bytes = b""  # a step in the directory of the run
    same: dict[str, tuple[str, int]] = {}  # what is not copied but taken from there, as `unchanged_files` returns it


class FastSteps:
    """The steps of a run on its fast tier. All processes of the job call the methods in the same order.

    Attributes:
        tier: the directories of the hosts.
        abandoned: whether copies to the slow tier are abandoned.
    """

    def __init__(
        self, settings: FastTierSettings, run: RunDirectory, job_sync: JobSync, store: StoreSettings, clock: Clock
    ) -> None:
        self.tier = FastTier(settings, run.directory)
        self._run, self._job_sync, self._settings, self._store = run, job_sync, settings, store
        self.clock, self.abandoned = clock, threading.Event()
        self._drains = list[_Copying]()  # each waits for the one before
        self._of_this_job, self._bytes = set[str](), dict[str, int]()  # by name; the bytes: on the fullest host
        self._foreign = list[str]()  # steps of a run whose directory was deleted, or is not mounted
        self._unusable = list[str]()  # what is left of older steps
        self._has_found_steps = self._is_clean = False
        self._is_leaving, self._ends_at = False, math.inf  # by time.monotonic()
        self.drain_s = 0.0  # what the last copy took
        run.fast_tier = self.tier.files, self.tier.directory

    def look(self) -> None:
        """Find out what is on the fast tier. The steps are candidates of a restore from then on."""
        self.tier.join(self._job_sync.job, coordinator_host())
        names = self.tier.look(self._job_sync.job)

        def find() -> _Found:
            found = self._found(names)
            self._run.found_on_fast_tier(found.entries)  # here: the others receive what is left behind
            return found

        sent = self._job_sync.on_primary("reading the fast tier", find, time.monotonic)
        found = msgspec.convert(sent, _Found)
        self._run.fast, self._bytes = list(found.entries), self.tier.host_bytes()
        self._foreign, self._unusable = list(found.foreign), list(found.unusable)
        self._has_found_steps = any(entry.damaged is None for entry in found.entries)

    @time_limited
    def _found(self, names: Mapping[str, bool]) -> _Found:
        """In the primary: what these directories are. The value of each: whether some host has its manifest."""
        run_id, found, foreign, unusable = self._run.run_id(), list[Entry](), list[str](), list[str]()
        for name, has_manifest in names.items():
            path = f"{self.tier.directory}/{name}"
            if parse_step_name(name) is None:
                continue
            if not has_manifest:  # the log of its host says more, unless its removal was interrupted
                unusable.append(name)
                continue
            try:
                info = open_committed(self.tier.files, path, is_complete=False).manifest.info
            except CheckpointError as error:
                if not is_damage(error):
                    raise  # a host does not answer: the step may be intact
                _log.warning("%s: ignored: %s", path, error)
                unusable.append(name)
                continue
            entry = _entry_of(name, info)
            if entry.run != run_id:
                foreign.append(name)
            elif not self.tier.files.is_complete(name):
                is_known = self.tier.files.layout(name) is not None
                why = (
                    "too many of its files are on no host of this job"
                    if is_known
                    else f"no host has an intact {LAYOUT_NAME}"
                )
                _log.warning("step %d of the fast tier is ignored: %s", entry.step, why)
                unusable.append(name)
                found.append(dataclasses.replace(entry, damaged=why))  # what it left behind is still left behind
            else:
                found.append(entry)
        entries = tuple(sorted(found, key=lambda entry: entry.order))
        return _Found(entries, tuple(foreign), tuple(unusable))

    def own(self) -> None:
        """After the run is owned: join the other hosts, remove what interrupted saves have left, and look."""
        if self._is_clean:
            return
        self.tier.join(self._job_sync.job, coordinator_host())
        self._job_sync.on_all("removing what interrupted saves have left on the fast tier", self.tier.clean)
        self.look()
        self.tier.remove_interrupted()
        self._job_sync.on_primary("reading the history", self._warn_about_lost_step, time.monotonic)
        if self._foreign and self._job_sync.is_primary:
            _log.warning(
                "%s: has steps of another run in %s (%s): that was deleted, or is not mounted. They are removed once "
                "this run has a step there",
                self.tier.directory,
                self._run.directory,
                ", ".join(self._foreign),
            )
        self._is_clean = True

    def _warn_about_lost_step(self) -> None:
        """In the primary, before the first save: warn if the last step that was saved is gone from all hosts."""
        last = None
        with contextlib.suppress(CheckpointError):  # a history that cannot be read prevents no training
            last = self._run.past.last_fast
        if last is None or last.name in {*self._foreign, *self._unusable, *(each.name for each in self._run.fast)}:
            return
        found = branch_last([*self._run.newest(), *self._run.fast_line()], self._run.left())
        if found and found[-1].step >= (last.step or 0):
            return
        left = "no other step is left"
        if found:
            place = "of the fast tier" if found[-1].is_fast else f"in {self._run.directory}"
            left = f"the newest that is left is step {found[-1].step} {place}"
        _log.warning(
            "step %s, the last one that was saved to the fast tier, at %s, is on no host of this job; %s. Hosts were "
            "replaced, or %s was erased, or is not mounted",
            last.step,
            last.time.isoformat(" ", "seconds"),
            left,
            self.tier.directory,
        )

    def refuse(self, step: int) -> None:
        """Refuse a step that the fast tier has, or that is below a later one, unless a roll-back left it behind."""
        line = self._run.fast_line()
        latest = max((entry.step for entry in line), default=-1)
        if step <= latest:
            raise CheckpointExistsError(
                f"{self.tier.directory}: expected a step above {latest}, which the fast tier already has, found {step}"
            )

    def saved(
        self, name: str, info: Mapping[str, Any], host_bytes: int, *, drains: bool, must_drain: bool
    ) -> FastSaved:
        """In the primary, when a step is published: decide what becomes of it, and of the older ones.

        `host_bytes`: what it takes on the host on which it takes most.
        """
        fast = [*self._run.whole_fast(), _entry_of(name, info)]
        held = {drain.subject for drain in self._drains if not drain.done()}
        self._bytes[name] = host_bytes
        left = frozenset(fast[-1].left_behind) - {name}
        removed = [each for each in self._expired(branch_last(fast, left)) if each not in held]
        has_slow_step = bool(self._run.infos())
        if has_slow_step:
            removed += self._foreign
            self._foreign = []
        if has_slow_step or self._has_found_steps:  # else this job lacks hosts, and began from scratch
            removed += [each for each in self._unusable if each not in held]
            self._unusable = [each for each in self._unusable if each in held]
        if drains:
            self._run.chosen = fast[-1].info()
        if drains and not self._has_time(int(info["step"])):
            drains = False
        elif drains and not must_drain and len(held) >= _MOST_DRAINS:
            _log.warning(
                "step %s stays on the fast tier: %d earlier ones are still being copied to %s",
                info["step"],
                len(held),
                self._run.directory,
            )
            drains = False
        return FastSaved(tuple(removed), drains)

    def _expired(self, fast: Sequence[Entry]) -> list[str]:
        """The names of the first steps beyond the number or the bytes that are kept; the last is always kept."""
        limit, total = self._settings.max_bytes, 0
        sizes = [self._bytes.get(entry.name, 0) for entry in fast]
        for kept, size in enumerate(reversed(sizes)):
            total += size
            if kept and (kept >= self._settings.keep or (limit is not None and total > limit)):
                return [entry.name for entry in fast[: len(fast) - kept]]
        return []

    def after(self, committed: Committed, message: FastSaved, job: Coordinator | None) -> None:
        """In all processes, after a step is published: remove the older ones of this host, and begin to drain it."""
        name, info = os.path.basename(committed.directory), committed.manifest.info
        entry = _entry_of(name, info)
        self._run.saved_to_fast_tier(entry, message.removed)
        if self._job_sync.is_primary:
            self._run.record_roll_back()
        self._of_this_job.add(name)
        self._of_this_job.difference_update(message.removed)
        if self.tier.is_leader:
            self.tier.remove(message.removed)
        if job is not None and message.drains:
            self.drain(name, entry.step, job)
        elif job is not None:
            job.end()

    def drain(self, name: str, step: int, job: Coordinator) -> None:
        """Begin to copy a step to the slow tier in the background, once earlier copies have ended.

        `job`: a coordinator for this copy only.
        """
        tracker, before = ProgressTracker(), self._drains[-1] if self._drains else None
        work = functools.partial(_Drain(self, self._run, job, self._store, tracker).run, name, step, before)
        self._drop_ended()
        self._drains.append(start_save(name, work, tracker=tracker))

    def _drop_ended(self) -> None:
        """Forget the copies that have ended, except the first that failed: `settle` returns its error."""
        ended = [drain for drain in self._drains if drain.done()]
        for drain in ended:
            drain.wait_until_ended()  # it may not have its error yet
        failed = [drain for drain in ended if drain.error() is not None]
        for drain in failed[1:]:
            drain.outcome()  # the log has its error, which counts as seen
        self._drains = [drain for drain in self._drains if drain not in ended or drain in failed[:1]]

    def leave(self, left_s: float | None) -> None:
        """Record that the job was asked to stop, and has `left_s` seconds left; None: no limit."""
        self._is_leaving = True
        self._ends_at = math.inf if left_s is None else time.monotonic() + left_s

    def _has_time(self, step: int) -> bool:
        """Whether a step can be copied before the job has to end; otherwise say why not."""
        left_s = self._ends_at - time.monotonic()
        if self.drain_s <= left_s:
            return True
        why = f"a copy takes about {self.drain_s:.3g} s, and {max(0.0, left_s):.3g} s are left"
        _log.warning("step %d stays on the fast tier: %s; the next job copies it", step, why)
        return False

    def undrained(self) -> tuple[str, int] | None:
        """In the primary: the name and the number of the newest step, if the slow tier has no later one."""
        line, slow = self._run.fast_line(), [entry.order for entry in self._run.newest()]
        if not line or (slow and max(slow)[:2] >= line[-1].order[:2]):
            return None
        is_draining = any(drain.subject == line[-1].name and not drain.done() for drain in self._drains)
        if is_draining or not self._has_time(line[-1].step):
            return None
        return line[-1].name, line[-1].step

    def paths_by_process(self, name: str, processes: int) -> dict[int, list[str]]:
        """Which process copies which files of a step: those that are on its host, if it can be."""
        layout = self.tier.files.layout(name)
        if layout is None:
            raise CheckpointError(f"{self.tier.directory}/{name}: no host has its layout")
        found: dict[int, list[str]] = {process: [] for process in range(processes)}
        leaders, is_own = self.tier.hosts.leaders(), name in self._of_this_job
        for writer, names in layout.files.items():
            process = writer if is_own else self.tier.holder(name, names)
            if process is None:
                process = leaders[writer % len(leaders)]
            found[process] += [path for path, _ in names]
        return found

    def settle(
        self, timeout_s: float | None, until: Callable[[], bool] | None, failed: BaseException | None
    ) -> BaseException | None:
        """Wait for all copies as `PendingSave.outcome`, and return `failed`, the error of a save, or their first error.

        If the job has to end, a copy that is not done in time is abandoned, which loses nothing.
        """
        drains, ends_at = self._drains, math.inf if timeout_s is None else time.monotonic() + timeout_s
        with suppress_secondary(failed, self._run.directory):
            try:
                for drain in drains:
                    left_s = None if timeout_s is None else max(0.0, ends_at - time.monotonic())
                    drain.outcome(left_s, LAST_PATIENCE_S if timeout_s is None else None, until)
            except CheckpointTimeoutError as late:
                if not self._is_leaving:
                    raise
                _log.warning("%s; it stays on the fast tier, and the next job copies it", late)
                self.abandoned.set()
            self._drains = [drain for drain in self._drains if drain not in drains]
        errors = [failed, *(drain.error() for drain in drains)]
        return next((error for error in errors if error is not None), None)

    def progress(self, tracker: ProgressTracker, done: int) -> None:
        """Count bytes of a copy. Raises CheckpointError: the copy is abandoned, because the job has to end."""
        tracker(done)
        if self.abandoned.is_set():
            raise CheckpointError("the job has to end; the step stays on the fast tier")


def _entry_of(name: str, info: Mapping[str, Any]) -> Entry:
    step, generation = parse_step_name(name) or (int(info["step"]), 0)
    return dataclasses.replace(entry_from_manifest(name, step, generation, info), is_fast=True)


class _Drain:
    """One copy of a step of the fast tier to the slow tier, as a process of the job makes it."""

    def __init__(
        self, fast: FastSteps, run: RunDirectory, job: Coordinator, settings: StoreSettings, tracker: ProgressTracker
    ) -> None:
        self._fast, self._run, self._job, self._settings, self._tracker = fast, run, job, settings, tracker
        self._transaction: Transaction | None = None

    def run(self, name: str, step: int, before: _Copying | None) -> CheckpointMetadata | None:
        """Copy and commit, once the copy `before` has ended. None: it was abandoned."""
        if before is not None:
            before.wait_until_ended()
        started, sign, doing = time.perf_counter(), self._tracker.sign, f"draining step {step} to {self._run.directory}"
        found = list[Committed]()

        def look() -> bytes:
            found.append(self._opened(name))
            return b""

        try:
            answer = self._job.exchange(doing, look, lambda values: self._begin(found[0], name, step), sign)
            begun = msgspec.msgpack.decode(answer, type=_BegunDrain)
            copy = functools.partial(self._copy, found[0], begun)
            self._job.exchange(doing, copy, lambda values: self._commit(found[0], started, values), sign, self._tracker)
            return describe(found[0])
        except BaseException as error:
            if self._transaction is not None:
                with suppress_secondary(error, self._run.directory):
                    self._transaction.abort_after(error)
            _log.warning("step %d of the fast tier was not drained: %s: %s", step, type(error).__name__, error)
            if isinstance(error, CorruptCheckpointError | StorageError) and is_damage(error):
                for entry in (each for each in self._run.whole_fast() if each.name == name):
                    self._run.saw_damage(entry)
            if not self._fast.abandoned.is_set():
                raise
            return None
        finally:
            self._job.end()

    def _opened(self, name: str) -> Committed:
        """The step, without what only holds for it: which of its files were taken over."""
        tier = self._fast.tier
        found = open_committed(tier.files, f"{tier.directory}/{name}")
        info = {key: value for key, value in found.manifest.info.items() if key != "taken_bytes"}
        return dataclasses.replace(found, manifest=msgspec.structs.replace(found.manifest, info=info))

    def _begin(self, source: Committed, name: str, step: int) -> bytes:
        self._run.check_owner()
        final, info = self._run.next_step_name(step), source.manifest.info
        publish = functools.partial(self._run.publish, final, info)
        path = f"{self._run.directory}/{final}"
        self._transaction = begin(self._run.backend, path, self._settings, publish, is_step=True)
        self._transaction.add_folders(folders_of(source.manifest))
        paths = self._fast.paths_by_process(name, self._job.processes)
        begun, before = _BegunDrain(os.fsencode(self._transaction.directory), paths), self._before()
        if before is not None:
            begun.before, begun.same = os.fsencode(before.directory), unchanged_files(before, source)
        return msgspec.msgpack.encode(begun)

    def _before(self) -> Committed | None:
        """The newest step in the directory of the run; None: there is none, or one of its steps is damaged."""
        found = self._run.newest()
        if not found or self._run.damaged():
            return None
        try:
            return open_committed(self._run.backend, f"{self._run.directory}/{found[-1].name}", is_complete=False)
        except CheckpointError as error:
            _log.warning("step %d is drained without sharing files: %s", found[-1].step, error)
            return None

    def _copy(self, source: Committed, begun: _BegunDrain) -> bytes:
        directory, paths = os.fsdecode(begun.directory), set(begun.paths[self._job.process])
        attempt = self._transaction or Attempt(self._run.backend, directory, self._settings)
        progress = functools.partial(self._fast.progress, self._tracker)
        same = {path: begun.same[path] for path in paths & begun.same.keys()}
        taken = attempt.take_files(os.fsdecode(begun.before), same)
        copy_verified(self._fast.tier.files, source, attempt, self._settings, progress, paths - taken)
        if attempt is not self._transaction:
            attempt.sync()
        return b"%d" % sum(same[path][1] for path in taken)

    def _commit(self, source: Committed, started: float, taken: Sequence[bytes]) -> bytes:
        """In the primary: make the copy a step of the run, and apply retention. `taken`: bytes that were not copied."""
        assert self._transaction is not None
        taken_bytes = sum(map(int, taken))
        info = {**source.manifest.info, **({"taken_bytes": taken_bytes} if taken_bytes else {})}
        committed = self._transaction.commit(msgspec.structs.replace(source.manifest, info=info))
        self._run.committed(committed, info, is_durable=self._settings.durability == "full")
        self._run.record_roll_back()
        took_s = time.perf_counter() - started
        drained = {"step": info["step"], "name": os.path.basename(committed.directory), "bytes": committed.data_bytes}
        self._fast.drain_s, now, entry = took_s, self._fast.clock(), _entry_of(drained["name"], info)
        lag_s = max(0.0, (now - entry.time).total_seconds())
        lag_steps = max([0, *(each.step - entry.step for each in self._run.fast_line())])
        self._run.history.add("drain", now, **drained, drain_s=took_s, lag_s=lag_s, lag_steps=lag_steps)
        _log.info("drained step %s to %s in %.3f s", info["step"], self._run.directory, took_s)
        self._run.retain()
        return b""
