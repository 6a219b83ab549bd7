"""StepManager: a run directory with a sequence of steps, saved in the background, restored with fall-back.

The turn of a save: the one before it has ended, and the run takes this step; in a job as process 0 finds.

Asks the save policy of a run about a step, in a job as all its processes do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from jaxckpt_train._validation import flag, time_limit
from jaxckpt_train.checkpoint import PathLike, absolute, load_checkpointables
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, SettingsError, suppress_secondary
from jaxckpt_train.metrics.events import Sink, checked_sinks
from jaxckpt_train.pending import LAST_PATIENCE_S, call_after
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    Decision,
    DecisionContext,
    Failures,
    PreservationPolicy,
    SaveCosts,
    SavePolicy,
    decide,
    require_policy,
)
from jaxckpt_train.policies.cost_model import LoopTimer, ShutdownPlan, Situation, choose, leave_early_s
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Restored, check_step
from jaxckpt_train.run.goodput import RunStatistics
from jaxckpt_train.run.history import Clock, plain_metrics, utc_now
from jaxckpt_train.run.job import JobDecisions, JobSync, decided_locally
from jaxckpt_train.run.owned import RunNotes
from jaxckpt_train.run.restoring import JobRestore, restore_newest
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.run.saving import Drift, SaveRequest, SaveResult, SaveSlot, StepSave
from jaxckpt_train.settings import STALL_TIMEOUT_S, StoreSettings, checked_settings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.threads import free_in_child
from jaxckpt_train.store.timeouts import call_with_timeout

NO_POLICY = Decision(True, "no save policy: every call saves")
_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")
_managers: weakref.WeakSet[StepManager] = weakref.WeakSet()


class SaveScheduler:
    """What the policy of one run decides.

    Args:
        policy: None: every step is saved.
        run: the directory.
        in_flight: the save under way.
        together: the processes of the job.
        clock: the time, with a time zone.

    Attributes:
        clock: measures the loop.
        reached_preemption: whether the job was asked to leave; the same in all processes.
    """

    def __init__(
        self, policy: SavePolicy | None, run: RunDirectory, save_slot: SaveSlot, job_sync: JobSync, clock: Clock
    ) -> None:
        self._policy, self._run, self._save_slot, self._clock = policy, run, save_slot, clock
        self._job = None if policy is None or job_sync.is_alone else JobDecisions(job_sync, policy)
        self._started = clock()
        self.clock, self._recalled = LoopTimer(), RunStatistics()
        job_sync.decides(decided_locally(policy))
        self.reached_preemption = False
        self._asked: tuple[int, Decision] | None = None  # in a job, what was decided and not begun yet

    def decide(self, step: int, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Whether to save a step, and why; `StepManager.decide` says more."""
        policy = self._policy
        if policy is None:  # who saves tells of the step
            return NO_POLICY
        with self.call(step):
            return self._decide(policy, step, metrics)

    @contextlib.contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Within: the loop has called with so many updates complete; after it the loop goes on."""
        self._run.log.completed = step
        self.clock.entered(step, self._save_slot.is_running())
        try:
            yield
        finally:
            self.clock.left(step, self._save_slot.is_running())

    def _decide(self, policy: SavePolicy, step: int, metrics: Mapping[str, Any] | None) -> Decision:
        now = self._clock()
        context = DecisionContext(
            now,
            is_saving_in_progress=self._save_slot.is_running(),
            reached_preemption=self.reached_preemption,
            read_metrics=None if metrics is None else functools.partial(plain_metrics, metrics),
            run_started=self._started,
            read_costs=self.costs,
            read_failures=functools.partial(self._failures, now),
        )
        info = CheckpointInfo(step, now)
        if self._job is None:
            return decide(policy, info, self._previous(), context)

        def ask() -> tuple[Decision, bool]:
            previous = self._previous()
            return decide(policy, info, previous, context), bool(previous)

        if self._asked is None or self._asked[0] != step:  # else who has asked `should_save` saves now
            found = self._job.decide(info, context, ask, self._save_slot.is_over, self._save_slot.report_outcome)
            self._asked = (step, found) if found.save else None
            return found
        return self._asked[1]

    def begun(self) -> None:
        """A save has begun: what was decided before it is done."""
        self._asked = None

    def costs(self) -> SaveCosts:
        """What saves were seen to cost, by this process or those before it."""
        past = self._run.past
        if past is not self._recalled:
            self._recalled = past
            self.clock.recall(past.cost_s, past.duration_s)
        return self.clock.costs()

    def situation(self, left_s: float | None, unsaved: int) -> Situation:
        """What is known when the job has been asked to leave, with this update complete and not saved."""
        self._run.log.completed = unsaved  # it may be told of nowhere else
        running, committed, costs = self._save_slot.running_info(), self._run.infos(), self.costs()
        return Situation(
            left_s,
            unsaved,
            running[0].step if running else None,
            self._save_slot.running_for_s() if running else 0.0,
            committed[-1].step if committed else None,
            costs.duration_s,
            costs.step_s,
        )

    def _failures(self, now: datetime.datetime) -> Failures:
        before = self._run.past.failures
        return Failures(before.count, before.observed_s + max(0.0, (now - self._started).total_seconds()))

    def _previous(self) -> tuple[CheckpointInfo, ...]:
        return (*self._run.infos(), *self._save_slot.running_info())


def wait_until_free(
    job_sync: JobSync,
    run: RunDirectory,
    save_slot: SaveSlot,
    step: int,
    *,
    force: bool,
    timeout_s: float | None,
    overwrite: bool,
) -> str | None:
    """Wait until it is the turn of a step, or say why it is skipped; the same in all processes of a job.

    Raises:
        As `InFlight.wait_for_turn` and `RunDirectory.refuse`.
    """

    def acquire() -> str | None:
        why_not = save_slot.wait_until_free(step, force, timeout_s)
        if why_not is None:
            run.refuse(step, overwrite=overwrite)
        return why_not

    try:
        found: str | None = job_sync.led("waiting to save", acquire, time.monotonic)
    except CheckpointError as error:
        if not job_sync.leads and not isinstance(error, CheckpointTimeoutError):
            save_slot.report_outcome(is_told=True)
        raise
    if not job_sync.leads and found is None:
        save_slot.report_outcome()  # within `telling_later`: this process joins first
    return found


class Holder(Protocol):
    """What a manager is part of, and is closed with."""

    def close(self) -> None:
        """Close it, and the manager."""


def _never() -> bool:
    return False


class StepManager(RunNotes):
    """A sequence of checkpoints in one directory. A step's label is the number of completed updates.

    Reading needs no lock. The first save takes the directory for this process: two jobs cannot save to one directory.

    Args:
        directory: of the run; created by the first save.
        save_decision_policy: which steps `save` saves; None: every one it is called with.
        preservation_policy: which committed steps are kept; None: all.
        best_link: have a link in the directory that stands for the best step; None: none.
        settings: how checkpoints are stored.
        if_busy: what a save does while the one before is under way: "wait" for it, or "skip" this step.
        stall_timeout_s: seconds without any progress after which the save before is not waited for any more.
        if_stalled: what a save does then: "skip" this step with a warning, or "raise" CheckpointTimeoutError.
        sinks: each is called with every event of the history, as `PrometheusSink` is, on a thread of its own.
        clock: the time, with a time zone, for tests; None: the wall clock.
        backend: where the directory is.

    Attributes:
        history: of the run, `history.jsonl` in its directory.
        restored_step: the step that `restore` brought back last; None: none so far.
        is_in_loop: whether a loop goes on from what was restored, so that `restore` only reads.
        drift: compares each save with what the loop was resumed with; None: nothing does.
        holder: what it is closed with; None: it is used by itself.
        is_within: whether it is used in a `with`, which closes it.
        users: numbers of the threads that have used it.
        is_replaced: whether a newer manager of this process has taken over its directory.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        save_decision_policy: SavePolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        best_link: BestLink | None = None,
        settings: StoreSettings | None = None,
        if_busy: Literal["wait", "skip"] = "wait",
        stall_timeout_s: float = STALL_TIMEOUT_S,
        if_stalled: Literal["skip", "raise"] = "skip",
        sinks: Sequence[Sink] = (),
        clock: Clock | None = None,
        backend: Backend | None = None,
    ) -> None:
        if save_decision_policy is not None:
            require_policy("StepManager.save_decision_policy", save_decision_policy, "should_save")
        if preservation_policy is not None:
            require_policy("StepManager.preservation_policy", preservation_policy, "should_preserve")
        self.directory = absolute(directory)
        self.settings = checked_settings("StepManager.settings", settings)
        self.restored_step: int | None = None
        self.is_in_loop = False
        self.drift: Drift | None = None
        clock = clock or utc_now
        self._backend = backend or LocalBackend()
        self._save_slot = SaveSlot(if_busy, stall_timeout_s, if_stalled)
        limit_s, rate = self.settings.barrier_timeout_s, self.settings.scrub_bytes_per_s
        run = RunDirectory(self._backend, self.directory, preservation_policy, clock, rate, best_link)
        job_sync = JobSync(current(), limit_s, run, self._backend, self.directory)
        super().__init__(self.directory, run, job_sync, clock)
        self._save_scheduler = SaveScheduler(save_decision_policy, run, self._save_slot, job_sync, clock)
        self.history.send_to(checked_sinks("StepManager.sinks", sinks))
        self.telling_later, self.leave_to_parent = self._save_slot.telling_later, self._save_slot.leave_to_parent
        self.holder: weakref.ref[Holder] | None = None
        self.is_within = self.is_replaced = False
        self.users = set[int]()
        _managers.add(self)
        self._closed, self._guard = False, threading.RLock()  # each save has its turn
        free_in_child(self)

    def check_fresh(self, progress: ReadProgress | None = None, *, allow_flax: bool = False) -> None:
        """Raise CorruptCheckpointError if there are step directories, none of them whole; `progress`: of waits.

        Where no loop of this run has had its state yet, checkpoints of Flax are refused, but for `allow_flax`.
        """
        may_be = allow_flax or self._run.past.has_begun
        self._job_sync.led("looking for steps", lambda: self._run.check_fresh(progress, may_be), time.monotonic)

    def own(self) -> None:
        """Take the directory for this process and clean what dead owners left; the first save does so by itself.

        Raises:
            DirectoryLockedError, StorageError: a live process owns it, or it cannot be created.
            CheckpointTimeoutError: its disk has not answered for ten minutes; as `restore`.
        """
        self._check_open()
        self._replace_idle()
        self._job_sync.own()

    def all_do(self, doing: str, act: Callable[[], T]) -> T:
        """Do something in this process, and in a job in all of them: what it raises in one, it raises in all."""
        return self._job_sync.all_do(doing, act)

    def decide(self, step: int, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Whether the save policy asks for this step, and why.

        docs/how-to/multi-process.md says how often it is asked in a job.

        Reads no device unless the policy decides by metrics.
        """
        return self._save_scheduler.decide(step, metrics)

    def should_save(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """As `decide`, without the reason."""
        return self.decide(check_step(step), metrics).save

    def is_saved(self, step: int) -> bool:
        """Whether a step that this process has saved is committed, or on its way; in a job, as all processes see it."""
        return bool(
            self._job_sync.led(
                f"looking for step {step}", lambda: self.is_saving_in_progress() or self._run.is_committed(step)
            )
        )

    def is_saving_in_progress(self) -> bool:
        """Whether a save is under way in the background."""
        return self._save_slot.is_running()

    def save(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
        overwrite: bool = False,
        force: bool = False,
        temporary: bool = False,
        reason: str | None = None,
        timeout_s: float | None = None,
    ) -> SaveResult:
        """Save a step if the policy asks for it. Returns once the state is taken; the rest happens in the background.

        Args:
            step: number of completed updates.
            checkpointables: what to save, by name.
            metrics: numbers to record with the step; they are read from devices only if it is saved.
            custom_metadata: plain JSON data to keep with the step, less than 1 MiB; more belongs into a JsonValue.
            overwrite: publish a new generation of a step that exists; later steps are left behind, as by a roll-back.
            force: save whatever the policy says, and wait for a save under way instead of skipping.
            temporary: the step goes after the next commit.
            reason: why it is saved, if that is decided already: the policy is not asked.
            timeout_s: seconds for the end of the save under way, and again for taking the state; None: no limit.

        Returns:
            Whether it is being saved, and why or why not.

        Raises:
            CheckpointExistsError: the step is committed, without `overwrite`; or another saved since this one restored.
            SettingsError: it is below the step that the run goes on from, without `overwrite`.
            CheckpointTimeoutError: with `force` or `if_stalled="raise"`, instead of skipping the step: not in time, or
                the disk does not answer.
            Exception: the original error of the save before, if that failed.
        """
        step = check_step(step)
        # In a job a process first takes part, and then raises what the save before has failed with.
        later = contextlib.nullcontext() if self._job_sync.is_alone else self.telling_later()
        with self._guard, later, self._save_scheduler.call(step):
            self._check_open()
            self.check()
            started = time.perf_counter()
            decided = reason or ("forced" if force else None)
            decision = Decision(True, decided) if decided else self.decide(step, metrics)
            decide_s = time.perf_counter() - started
            if not decision.save:
                return SaveResult(False, decision.reason)
            started = time.perf_counter()
            self._replace_idle()
            self._job_sync.hold()
            why_not = wait_until_free(
                self._job_sync,
                self._run,
                self._save_slot,
                step,
                force=force,
                timeout_s=time_limit("StepManager.save: timeout_s", timeout_s),
                overwrite=flag("StepManager.save: overwrite", overwrite),
            )
            if why_not is not None:
                return SaveResult(False, why_not)
            wait_s = time.perf_counter() - started
            cost_s = self._save_scheduler.costs().cost_s
            more = (custom_metadata, temporary or decision.temporary, decide_s, wait_s, cost_s)
            request = SaveRequest(step, decision.reason, metrics, *more)
            return self._begin(request, checkpointables, force, timeout_s)

    def _begin(
        self, request: SaveRequest, checkpointables: Mapping[str, Any], force: bool, timeout_s: float | None
    ) -> SaveResult:
        save = StepSave(
            request,
            checkpointables,
            backend=self._backend,
            directory=self.directory,
            run=self._run,
            job_sync=self._job_sync,
            settings=self.settings,
            clock=self._clock,
            took=self._save_scheduler.clock.committed,
            drift=self.drift,
        )
        now, metrics = self._clock(), save.metrics or None
        self._save_slot.info = CheckpointInfo(request.step, now, metrics, temporary=request.temporary)
        self._save_scheduler.begun()
        _log.debug("step %d: saving (%s)", request.step, request.reason)
        subject, patience_s = f"step {request.step} to {self.directory}", self._save_slot.patience_s(force)
        try:
            pending = save.start(subject, self._save_slot.begun, timeout_s, patience_s, self._save_slot.is_time_up)
        except CheckpointTimeoutError as stalled:
            return SaveResult(False, self._save_slot.not_taken(request.step, force, timeout_s, stalled))
        self._save_scheduler.clock.save_began(request.step, save.device_wait_s)
        return SaveResult(True, request.reason, pending)

    def restore(
        self,
        targets: Mapping[str, Any] | None = None,
        step: int | None = None,
        *,
        progress: ReadProgress | None = None,
        roll_back: bool = False,
    ) -> dict[str, Any]:
        """Restore checkpointables into targets, to go on from there.

        The next save continues the run from the restored step: after an older one it leaves the later steps behind,
        which retention may delete. `load` only reads. So does this in the loop of a `CheckpointCallback`, without
        `roll_back`.

        Args:
            targets: by name; a target of None means without one. None: all checkpointables, without targets.
            step: which, also one that was set aside as damaged; None: the newest one that is whole, falling back past
                damaged ones with a warning each.
            progress: called with numbers of bytes as they are read, and 0 in waits; what it raises ends the restore.
            roll_back: continue from an older step on purpose: no warning, and also in the loop of a callback.

        Returns:
            What was restored, by name. `restored_step` tells from which step.

        Raises:
            StepNotFoundError: there is no such step, or no step at all.
            CorruptCheckpointError: no candidate is whole.
            MismatchError: a target does not fit; nothing was read.
        """
        if self.is_in_loop and not flag("StepManager.restore: roll_back", roll_back):
            return self.load(targets, step, progress=progress)
        self.refuse_replaced()
        self.wait()
        job = JobRestore(self._job_sync, self._backend, targets, self.settings, progress)
        if not self._job_sync.leads:
            results, self.restored_step = job.follow()
            return results
        more: dict[str, Any] = {"targets": targets, "settings": self.settings, "progress": progress, "asked": step}
        restore = functools.partial(restore_newest, self._backend, self.directory, **more)
        with job.led() as load:
            use = functools.partial(restore, load=load)
            then = functools.partial(self._run.rolled_back, warns=not roll_back)
            restored: Restored = self._run.with_entries(step, use, damaged=True, progress=progress, then=then)
            self.restored_step = restored.entry.step
            call_with_timeout(self.directory, lambda moved: self._run.judge(restored), progress)
            restored.warn_of_left_out()
            job.restored(restored.entry.step)
        return restored.results

    def load(
        self,
        targets: Mapping[str, Any] | None = None,
        step: int | None = None,
        *,
        progress: ReadProgress | None = None,
    ) -> dict[str, Any]:
        """As `restore`, but only reads: the next save continues the run as if nothing was loaded.

        A save under way is not waited for; its step is not there yet.
        """
        if not self._job_sync.is_alone:
            return load_checkpointables(self.path(step), targets, settings=self.settings, progress=progress)
        more: dict[str, Any] = {"targets": targets, "settings": self.settings, "progress": progress, "asked": step}
        load = functools.partial(restore_newest, self._backend, self.directory, **more)
        return self._run.with_entries(step, load, damaged=step is not None, progress=progress).results

    def check(self) -> None:
        """Raise the error of a save that failed in the background, once; in a job the next save does, in all."""
        if self._job_sync.is_alone:
            self._save_slot.check()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the save under way is committed.

        Raises:
            CheckpointTimeoutError: not in time; it goes on.
            Exception: the original error of the save, if it failed.
        """
        error = self.settle(timeout_s)
        if error is not None:
            raise error

    def settle(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> BaseException | None:
        """As `wait`, but returns the error of a save that failed instead of raising it.

        Raises:
            CheckpointTimeoutError: not in time, it has not got any further for ten minutes, or `until` became true; it
                goes on.
        """
        return self._save_slot.settle(time_limit("timeout_s", timeout_s), until=until or _never)

    def leave_when(self, is_asked: Callable[[], bool], is_time_up: Callable[[], bool]) -> None:
        """Once asked, no save waits for its turn any more; one whose state is not taken when time is up is given up."""
        self._save_slot.is_asked_to_leave, self._save_slot.is_time_up = is_asked, is_time_up

    def plan_to_leave(self, left_s: float | None, unsaved: int | None) -> ShutdownPlan:
        """What to do now that the job was asked to leave; the same in all processes.

        Args:
            left_s: seconds in which all must be done; None: no limit.
            unsaved: the last completed update, if no save of it is committed or under way.
        """
        if unsaved is None:
            return choose(Situation(left_s, None, *(info.step for info in self._save_slot.running_info())))

        def plan() -> tuple[Any, ...]:
            return dataclasses.astuple(choose(self._save_scheduler.situation(left_s, unsaved)))

        return ShutdownPlan(*self._job_sync.led("choosing how to leave", plan))

    def agreed(self, value: bool) -> bool:
        """The same for all processes of a job: that of process 0."""
        return bool(self._job_sync.led("agreeing how to leave", lambda: value))

    def leave_early_s(self, limit_s: float) -> float:
        """How many seconds before a time limit to ask a job to leave."""
        costs = self._save_scheduler.costs()
        return leave_early_s(costs.duration_s, costs.step_s, limit_s)

    def leaves(self) -> None:
        """Tell the policies that the job was asked to leave."""
        self._save_scheduler.reached_preemption = True

    wait_until_finished = wait

    def give_up(self, exit_code: int) -> None:
        """Do not wait for the save under way, also at the end of the process, which has this exit code then."""
        self._save_slot.give_up(exit_code)

    def close(
        self, timeout_s: float | None = None, until: Callable[[], bool] | None = None, *, waits: bool = True
    ) -> None:
        """Wait for the save and the deletions under way, let go of the directory, and let the sinks catch up.

        Args:
            timeout_s: seconds to wait for the deletions; later ones go on while the process lives. None: 10 minutes.
            until: ends the wait for the deletions once it returns true; None: nothing does.
            waits: False: the save is not waited for; the directory is let go of once it has ended.

        Raises:
            CheckpointTimeoutError: the save does not get any further.
            Exception: the original error of a save that failed.
        """
        limit_s = time_limit("close: timeout_s", timeout_s)
        longest_s = LAST_PATIENCE_S if limit_s is None else limit_s
        if self._closed:
            return
        until = until or _never
        try:
            with self._guard:  # a save that another thread is starting is waited for, too
                self._closed = True
            self.leave_to_parent()  # in a fork
            if waits:
                self.wait()
        finally:  # who writes stays the owner: there is one after an interrupt
            last = self._save_slot.pending or self._save_slot.given_up
            call_after(last, self._job_sync.leave)
            ends_at = time.monotonic() + longest_s
            call_after(last, functools.partial(self._run.close, longest_s, until))
            self.history.finish(ends_at - time.monotonic(), until)

    def _replace_idle(self) -> None:
        """Close older managers of this directory that nobody in this process uses any more, such as in a notebook.

        A stored traceback keeps them alive there. A failed save of theirs is logged.
        """
        if self._run.is_owner or not self._job_sync.is_alone:
            return
        self._check_open()
        for other in list(_managers):
            if other is not self and other.directory == self.directory and other._is_idle():
                other._give_way()

    def _is_idle(self) -> bool:
        """Whether it may have the directory, is not used in a `with`, and no other live thread has used it."""
        lock = self._run.held.lock
        if self._closed or self.is_within or not self._job_sync.is_alone:
            return False
        others = {each.ident for each in threading.enumerate()} - {threading.get_ident()}
        return lock.may_be_held and not lock.is_inherited and not self.users & others

    def _give_way(self) -> None:
        try:
            failure = self.settle()
        except CheckpointTimeoutError as stalled:  # it keeps the directory, which is refused to the newer one
            _log.error("%s: its older manager cannot be closed: %s", self.directory, stalled)
            return
        if failure is not None:
            _log.error("a save of the older manager failed", exc_info=failure)
        self.is_replaced = True
        holder = None if self.holder is None else self.holder()
        if holder is None:
            self.close()
        else:
            holder.close()
        _log.warning("%s: taken over from an older manager of this process, which is closed now", self.directory)

    def refuse_replaced(self) -> None:
        """Take note of the thread that uses it; SettingsError: a newer manager has taken over its directory."""
        self.users.add(threading.get_ident())
        if self.is_replaced:
            raise SettingsError(
                f"{self.directory}: this manager or callback is closed, since a newer one of this process took over "
                "its directory; use the newer one"
            )

    def _check_open(self) -> None:
        self.refuse_replaced()
        if self._closed:
            raise SettingsError(f"{self.directory}: this StepManager is closed; make a new one")
        made_in, now = self._job_sync.processes, current().processes
        if made_in != now:
            raise SettingsError(
                f"{self.directory}: made in a job of {made_in} processes, found {now}: call jax.distributed.initialize "
                "before the manager, or the callback, is made"
            )

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"StepManager({self.directory!r}, restored_step={self.restored_step}{closed})"

    def __enter__(self) -> StepManager:
        self.is_within = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress_secondary(error, self.directory):
            self.close()
