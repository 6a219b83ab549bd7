"""StepManager: a directory with a sequence of checkpoints, saved in the background and restored with fallback."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from jaxckpt_train._validation import flag, leaf_patterns, stated_mode, time_limit
from jaxckpt_train.checkpoint import PathLike, absolute, load_checkpointables
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.checkpointables.unchanged import UnchangedLeaves
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, SettingsError, suppress_secondary
from jaxckpt_train.metrics.events import Sink, checked_sinks
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave, SaveSlot
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    Decision,
    PreservationPolicy,
    SavePolicy,
    metric_name,
    rank_checkpoints,
    require_policy,
)
from jaxckpt_train.policies.cost_model import ShutdownPlan, leave_early_s, plan_last_save
from jaxckpt_train.run.catalog import step_not_found
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import StepVanishedError, check_step
from jaxckpt_train.run.fast_steps import FastSteps, fast_policy
from jaxckpt_train.run.goodput import Attempt, Goodput, add_event, goodput, settled
from jaxckpt_train.run.history import Clock, RunEvent, metrics_to_json, plain_metrics, utc_now
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.run.record import Annotation
from jaxckpt_train.run.restoring import RunRestore, describe_listed
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.run.saving import Drift, SaveRequest, SaveResult, StepSave
from jaxckpt_train.run.scheduling import SaveScheduler
from jaxckpt_train.settings import STALL_TIMEOUT_S, FastTierSettings, StoreSettings, checked_settings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.backends.by_path import backend_for
from jaxckpt_train.store.reader import ReadProgress, polling
from jaxckpt_train.store.threads import free_in_child
from jaxckpt_train.store.timeouts import time_limited

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


class StepManager:
    """A sequence of checkpoints in one directory. The label of a step is the number of completed updates.

    Reading needs no lock. The first save takes the directory for this process, since two jobs cannot save to the same
    directory. In a multi-process job, the primary writes for all, and each process lists the steps that the primary has
    last reported; before the directory is owned, those on the disk.

    Args:
        directory: the directory of the run. The first save creates it.
        save_decision_policy: decides which steps `save` saves. None: every step.
        preservation_policy: decides which committed steps are kept. None: all of them.
        best_link: maintain a link in the directory that points to the best step. None: no link.
        fast_tier: save more often to a directory on each host, from where some steps are copied to `directory`.
        frozen: patterns of leaf paths, such as "params/base/**", that never change: only the first save writes them.
            Of other leaves that do not change, this holds from the third save on.
        settings: how checkpoints are stored.
        if_busy: what a save does while the previous one is running: "wait" for it, or "skip" this step.
        stall_timeout_s: how many seconds without any progress a save waits for the previous one.
        if_stalled: what it does then: "skip" this step with a warning, or "raise" CheckpointTimeoutError.
        sinks: each one is called with every event of the history, on its own thread, like `PrometheusSink`.
        clock: returns the time, with a time zone, for tests. None: the wall clock.
        backend: the storage that holds the directory. None: the local file system.

    Attributes:
        history: the history of the run, `history.jsonl` in its directory.
        restored_step: the step that the last `restore` restored. None: none so far.

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
        fast_tier: FastTierSettings | None = None,
        frozen: str | Sequence[str] | None = None,
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
        self.is_in_loop = False  # whether a loop continues from the restored step, so that `restore` only reads
        self.drift: Drift | None = None  # compares each save with the values that the loop resumed with
        self._clock, backend = clock or utc_now, backend or backend_for(self.settings)
        self._save_slot = SaveSlot(if_busy, stall_timeout_s, if_stalled)
        rate = self.settings.scrub_bytes_per_s
        self._run = RunDirectory(
            backend,
            self.directory,
            preservation_policy,
            self._clock,
            rate,
            best_link,
            self.settings.object_store.delete_grace_s,
        )
        self.history = self._run.history
        self._job_sync = JobSync(current(), self.settings.barrier_timeout_s, self._run)
        self._save_scheduler = SaveScheduler(
            save_decision_policy,
            self._run,
            self._save_slot,
            self._job_sync,
            self._clock,
            None if fast_tier is None else fast_policy(fast_tier),
        )
        self._fast: FastSteps | None = None
        if fast_tier is not None:
            self._fast = FastSteps(fast_tier, self._run, self._job_sync, self.settings, self._clock)
        self.history.send_to(checked_sinks("StepManager.sinks", sinks))
        self.deferring_errors, self.leave_to_parent = self._save_slot.deferring_errors, self._save_slot.leave_to_parent
        self._unchanged = UnchangedLeaves(None if frozen is None else leaf_patterns("StepManager.frozen", frozen))
        self._closed, self._guard = False, threading.RLock()  # one call of `save` at a time
        free_in_child(self)

    @property
    def steps(self) -> list[int]:
        """The committed steps in ascending order."""
        return sorted(entry.step for entry in self._run.newest())

    @property
    def latest(self) -> int | None:
        """The step that was committed last; after a roll-back, on the new branch. None: there is none.

        Steps of the fast tier count as far as `fast_steps` has them.
        """
        found = self._run.newest()
        fast = self._run.fast_line()
        if fast and (not found or fast[-1].order > found[-1].order):
            return fast[-1].step
        return found[-1].step if found else None

    @property
    def fast_steps(self) -> list[int]:
        """The steps on the fast tier in ascending order, as far as this process has saved or looked for them."""
        return sorted(entry.step for entry in self._run.fast_line())

    @property
    def damaged(self) -> list[int]:
        """The steps set aside as damaged and not saved again, in ascending order; `restore(step=...)` tries one."""
        return sorted({entry.step for entry in self._run.damaged()} - set(self.steps))

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The committed steps as policies see them, in ascending order of the step."""
        return sorted((entry.info() for entry in self._run.newest()), key=lambda info: info.step)

    def all_steps(self) -> list[int]:
        """Same as `steps`."""
        return self.steps

    def latest_step(self) -> int | None:
        """Same as `latest`."""
        return self.latest

    def is_committed(self, step: int) -> bool:
        """Whether this step is committed, and was not left behind by a roll-back."""
        return self._run.is_committed(step)

    def best(self, metric: str, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step with the best value of a metric. Of equal values, the latest wins; nan never does. None: no value.

        Args:
            metric: the name of the metric.
            mode: "min": lower is better; "max": higher is better; None: "min", but refused with a SettingsError for a
                metric such as "accuracy".
        """
        name = metric_name("best: metric", metric)
        infos = [entry.info() for entry in self._run.newest()]
        ranked = rank_checkpoints(infos, name, stated_mode("best: mode", mode, name))
        return ranked[0].step if ranked else None

    def path(self, step: int | None = None) -> str:
        """The directory of a step, for `jaxckpt_train.load` and `verify`, or to copy it; None: of the latest step.

        Raises StepNotFoundError if there is no such step.
        """
        return f"{self.directory}/{self._run.candidates(step)[0].name}"

    def metadata(self, step: int | None = None) -> CheckpointMetadata:
        """Describe what a step contains; None: the latest step. Raises StepNotFoundError if there is no such step."""
        if not self._job_sync.is_primary:
            try:
                return describe_listed(self._run, self._run.candidates(step, fast=True))
            except StepVanishedError as gone:
                raise step_not_found(self.directory, step, self._run.newest()) from gone
        while True:
            with contextlib.suppress(StepVanishedError), self._run.holding_candidates(step, fast=True) as (listed, _):
                return describe_listed(self._run, listed)

    @property
    def is_primary(self) -> bool:
        """Whether this process is the primary, which writes for all processes."""
        return self._job_sync.is_primary

    def pin(self, step: int, pinned: bool = True) -> None:
        """Keep a step whatever the preservation policy says; `pinned=False` removes the pin.

        Raises StepNotFoundError if there is no such step.
        """
        self._annotate(step, lambda: Annotation(pin=flag("pin: pinned", pinned)))

    def attach_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a committed step, such as those of an evaluation that finished later.

        Raises StepNotFoundError if there is no such step.
        """
        self._annotate(step, lambda: Annotation(metrics=metrics_to_json(plain_metrics(metrics))))

    def _annotate(self, step: int, change: Callable[[], Annotation]) -> None:
        """Annotate a step. In a job, the arguments of the primary count, and so does their error."""
        self._check_open()
        self._job_sync.hold()

        def write() -> None:
            self._run.annotate_step(check_step(step), change())

        self._job_sync.on_primary(f"writing the record of step {step}", write, time.monotonic)

    def note_preemption(self, step: int | None, reason: str, plan: str | None = None) -> None:
        """Record a preemption in the history: the step to save, the reason, and the chosen shutdown plan."""
        if self._job_sync.is_primary:
            self.history.add("preempted", self._clock(), step=step, reason=reason, plan=plan)

    def retain(self) -> None:
        """Delete the steps that the preservation policy no longer keeps now, instead of after the next commit.

        Raises DirectoryLockedError or StorageError if the directory cannot be owned.
        """
        self._check_open()
        self._job_sync.retain()

    def note_resume(self, step: int, resume_s: float) -> None:
        """Record in the history that the loop has its state of this step; wait at most a minute for the disk."""
        if self._job_sync.is_primary:
            self._run.log.resumed(step, resume_s)

    def note_completed(self, step: int) -> None:
        """Record for the history that the loop has completed this update, if no policy is asked about it."""
        self._run.log.completed = step

    def ends_as(self, how: str) -> None:
        """Set how the history describes the end of this process: "finished", "preempted", or an error."""
        self._run.log.ends_as = how

    @time_limited
    def goodput(self) -> Goodput:
        """The share of the run's time that went into updates that count, over all its processes so far.

        Raises CorruptCheckpointError, StorageError or CheckpointTimeoutError if the history cannot be read.
        """
        running = (self._run.log.completed, self._clock()) if self._run.is_owner else None
        lock, found = self._run.held.lock, list[Attempt]()
        was_live = lock.has_live_owner()
        for event in self.history.each(RunEvent):
            add_event(found, event)
        # A process may start meanwhile; one that ends records it first.
        return goodput(settled(found, running, is_live=was_live or lock.has_live_owner()))

    def check_fresh(self, *, allow_flax: bool = False) -> None:
        """Raise CorruptCheckpointError if the directory has steps, but no valid one.

        Checkpoints of Flax are refused, too, unless allowed or a loop of this run has already had its state.
        """
        allowed = allow_flax or self._run.past.was_resumed
        self._job_sync.on_primary(
            "looking for steps", lambda: self._run.check_fresh(allows_flax=allowed), time.monotonic
        )

    def own(self) -> None:
        """Take the directory for this process and clean up after dead owners. The first save calls this by itself."""
        self._check_open()
        self._job_sync.own()
        if self._fast is None:
            return
        try:
            self._fast.own()
        except BaseException as error:  # the caller may never call `close`, because its `with` block was not entered
            self.ends_as(type(error).__name__)
            with suppress_secondary(error, self.directory):
                self.close()
            raise

    def on_all(self, doing: str, act: Callable[[], T]) -> T:
        """Call a function in all processes of the job. An error that it raises in one of them is raised in all."""
        return self._job_sync.on_all(doing, act)

    def decide(self, step: int, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Return whether the save policy asks for this step, and why.

        It reads no device unless the policy decides by metrics. docs/how-to/multi-process.md says how often a policy is
        asked in a multi-process job.
        """
        return self._save_scheduler.decide(step, metrics)

    def should_save(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Return whether the save policy asks for this step."""
        return self.decide(check_step(step), metrics).save

    def is_saved(self, step: int) -> bool:
        """Return whether a step that this process saved is committed or being saved; all processes of a job agree."""
        return bool(
            self._job_sync.on_primary(
                f"looking for step {step}",
                lambda: self.is_saving_in_progress() or self._run.is_committed(step) or step in self.fast_steps,
            )
        )

    def drain_newest(self) -> None:
        """Begin to copy the newest step to the directory of the run, if it is only on the fast tier."""
        if self._fast is None:
            return
        self._save_slot.wait_until_ended()
        self._job_sync.hold()
        self._fast.own()
        newest = self._job_sync.on_primary("choosing a step to drain", self._fast.undrained)
        if newest is not None:
            name, step = newest
            self._fast.drain(name, step, self._job_sync.channel("drain", self.settings.barrier_timeout_s))

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is running in the background."""
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
        fast_only: bool = False,
    ) -> SaveResult:
        """Save a step if the policy asks for it. Return once the state is copied; the save continues in the background.

        Args:
            step: the number of completed updates.
            checkpointables: the values to save, by name.
            metrics: numbers to record with the step. They are read from devices only if the step is saved.
            custom_metadata: plain JSON data to keep with the step, less than 1 MiB. Save more as a JsonValue.
            overwrite: publish a new generation of an existing step. Later steps are left behind, as after a roll-back.
            force: save regardless of the policy, and wait for a running save instead of skipping the step.
            temporary: delete the step after the next commit.
            reason: why the step is saved, if that is already decided. The policy is then not asked.
            timeout_s: the time limit for the end of the running save, and again for copying the state. None: no limit.
            fast_only: save the step to the fast tier, and do not copy it to the directory of the run.

        Returns:
            Whether the step is being saved, and why or why not.

        Raises:
            CheckpointExistsError: the step is committed, without `overwrite`; or another process has saved since this
                one restored.
            SettingsError: the step is below the one that the run continues from, without `overwrite`.
            CheckpointTimeoutError: the time limit was exceeded or the disk does not answer. Raised only with `force` or
                `if_stalled="raise"`; otherwise the step is skipped.
            Exception: the original error of the previous save, if it failed.
        """
        step = check_step(step)
        # In a multi-process job, a process first joins the save, and then raises the error of the previous one.
        later = contextlib.nullcontext() if self._job_sync.is_single_process else self.deferring_errors()
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
            self._job_sync.hold()
            if self._fast is not None:
                self._fast.own()
            limit_s = time_limit("StepManager.save: timeout_s", timeout_s)
            overwrite = flag("StepManager.save: overwrite", overwrite)
            skip_reason = self._wait_until_free(step, force, limit_s, overwrite)
            if skip_reason is not None:
                return SaveResult(False, skip_reason)
            wait_s = time.perf_counter() - started
            cost_s, is_temporary = self._save_scheduler.known_costs().cost_s, temporary or decision.temporary
            why = decision.reason
            request = SaveRequest(
                step,
                why,
                metrics,
                custom_metadata,
                is_temporary,
                decide_s,
                wait_s,
                cost_s,
                fast_only=fast_only or decision.fast,
                must_drain=force,
            )
            return self._begin(request, checkpointables, force, timeout_s)

    def _wait_until_free(self, step: int, force: bool, timeout_s: float | None, overwrite: bool) -> str | None:
        """Wait until a step may be saved, or return why to skip it; the same in all processes of a job."""
        job_sync, slot = self._job_sync, self._save_slot

        def acquire() -> str | None:
            skip_reason = slot.wait_until_free(step, force, timeout_s)
            if skip_reason is None:
                self._run.refuse(step, overwrite=overwrite)
                if self._fast is not None and not overwrite:
                    self._fast.refuse(step)
            return skip_reason

        try:
            found: str | None = job_sync.on_primary("waiting for the previous save", acquire, time.monotonic)
        except CheckpointError as error:
            if not job_sync.is_primary and not isinstance(error, CheckpointTimeoutError):
                slot.report_outcome(is_raised=True)
            raise
        if not job_sync.is_primary and found is None:
            slot.report_outcome()  # inside `deferring_errors`: this process joins the save before it raises
        return found

    def _begin(
        self, request: SaveRequest, checkpointables: Mapping[str, Any], force: bool, timeout_s: float | None
    ) -> SaveResult:
        save = StepSave(
            request,
            checkpointables,
            run=self._run,
            job_sync=self._job_sync,
            settings=self.settings,
            clock=self._clock,
            timer=self._save_scheduler.clock,
            drift=self.drift,
            unchanged=self._unchanged,
            fast=self._fast,
        )
        now, metrics = self._clock(), save.metrics or None
        slot = self._save_slot
        slot.info = CheckpointInfo(request.step, now, metrics, temporary=request.temporary)
        self._save_scheduler.save_started()
        _log.debug("step %d: saving (%s)", request.step, request.reason)
        pending: PendingSave[Any] | None
        try:
            pending = save.start(slot.begun, timeout_s, slot.patience_s(force), slot.is_time_up)
        except CheckpointTimeoutError as stalled:
            if self._job_sync.is_single_process:
                return SaveResult(False, slot.not_taken(request.step, force, timeout_s, stalled))
            # The save fails in all processes, and all raise its error later. If this process alone skipped the step, it
            # would not take the same decisions as the others from here on.
            pending = slot.pending
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
        """Restore checkpointables into targets, to continue the run from there.

        The next save continues the run from the restored step. If that is an older step, the later ones are left
        behind, and retention may delete them. Use `load` to only read. Inside the loop of a `CheckpointCallback`, this
        method only reads as well, unless `roll_back` is set.

        Args:
            targets: the targets by name; a target of None restores without one. None: all checkpointables without
                targets.
            step: the step, which may also be one that was set aside as damaged. None: the newest valid one. Each
                damaged step that is passed over causes a warning.
            progress: called with the number of bytes of each read, and with 0 during waits. An error that it raises
                ends the restore.
            roll_back: continue from an older step on purpose: without a warning, and also inside the loop of a
                callback.

        Returns:
            The restored values by name. `restored_step` is the step that they come from.

        Raises:
            StepNotFoundError: the step does not exist, or the run has no step.
            CorruptCheckpointError: no candidate is valid.
            MismatchError: a target does not fit; nothing was read.
        """
        if self.is_in_loop and not flag("StepManager.restore: roll_back", roll_back):
            return self.load(targets, step, progress=progress)
        self.wait()
        restore = RunRestore(self._run, self._job_sync, targets, self.settings, progress, self._fast)
        with polling(progress):
            results, self.restored_step = restore.restore(step, warns=not roll_back)
        if self._fast is not None:
            if restore.backend is not self._run.backend:
                _log.info("step %d was restored from the fast tier", self.restored_step)
            self._save_scheduler.renews_copies = self._fast.tier.protection.survives() > 0
        self._unchanged.restored(restore.backend, restore.committed, self._job_sync.job.process, self.settings)
        return results

    def load(
        self, targets: Mapping[str, Any] | None = None, step: int | None = None, *, progress: ReadProgress | None = None
    ) -> dict[str, Any]:
        """Load checkpointables like `restore`, but only read: the next save continues the run as before.

        The method does not wait for a running save, and does not see its step.
        """
        if not self._job_sync.is_single_process:
            return load_checkpointables(self.path(step), targets, settings=self.settings, progress=progress)
        with polling(progress):
            return RunRestore(self._run, self._job_sync, targets, self.settings, progress, self._fast).load(step)

    def check(self) -> None:
        """Raise the error of a failed background save, once. In a job, the next save raises it in all processes."""
        if self._job_sync.is_single_process:
            self._save_slot.check()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the running save is committed; raise its original error if it failed.

        Raises CheckpointTimeoutError if the time limit was exceeded; the save continues.
        """
        error = self.settle(timeout_s)
        if error is not None:
            raise error

    def settle(
        self,
        timeout_s: float | None = None,
        until: Callable[[], bool] | None = None,
        *,
        waits_for_copies: bool = True,
    ) -> BaseException | None:
        """Wait like `wait`, or until `until` returns true, but return the error of a failed save.

        `waits_for_copies`: also wait until steps of the fast tier are copied to the directory of the run.
        """
        error = self._save_slot.settle(time_limit("timeout_s", timeout_s), until=until)
        if waits_for_copies and self._fast is not None:
            error = self._fast.settle(timeout_s, until, error)
        return error

    def leave_when(self, is_asked: Callable[[], bool], is_time_up: Callable[[], bool]) -> None:
        """Stop waiting for a previous save when asked to leave, and for the copy of a state when the time is up."""
        self._save_slot.is_asked_to_leave, self._save_slot.is_time_up = is_asked, is_time_up

    def plan_to_leave(self, unsaved: int, left_s: float | None) -> ShutdownPlan:
        """Return whether to save the last completed update in the seconds left after a request to stop.

        `left_s` is None if there is no limit. No save is running. In a job, process 0 decides for all.
        """

        def plan() -> ShutdownPlan:
            return plan_last_save(unsaved, self.latest, self._save_scheduler.known_costs().duration_s, left_s)

        return ShutdownPlan(*self._job_sync.on_primary("choosing how to leave", plan))

    def leave_early_s(self, limit_s: float) -> float:
        """Return how many seconds before a time limit the loop should be asked to stop."""
        costs = self._save_scheduler.known_costs()
        return leave_early_s(costs.duration_s, costs.step_s, limit_s)

    wait_until_finished = wait

    def leaves(self, left_s: float | None = None) -> None:
        """Let the policies know that the job was asked to stop, and has `left_s` seconds left; None: no limit."""
        self._save_scheduler.reached_preemption = True
        if self._fast is not None:
            self._fast.leave(left_s)

    def give_up(self, exit_code: int) -> None:
        """Do not wait for the running save, not even at the end of the process, which then has this exit code."""
        self._save_slot.give_up(exit_code)

    def close(
        self, timeout_s: float | None = None, until: Callable[[], bool] | None = None, *, waits: bool = True
    ) -> None:
        """Wait for the running save and for deletions, release the directory, and let the sinks catch up.

        Args:
            timeout_s: how many seconds to wait for deletions. Later ones continue while the process lives. None: ten
                minutes.
            until: ends the wait for deletions once it returns true. None: nothing ends it.
            waits: False: do not wait for the save. The directory is released once the save has ended.

        Raises the original error of a failed save, or CheckpointTimeoutError if it makes no progress.
        """
        limit_s = time_limit("close: timeout_s", timeout_s)
        longest_s = LAST_PATIENCE_S if limit_s is None else limit_s
        if self._closed:
            return
        try:
            with self._guard:  # this waits for a save that another thread is starting
                self._closed = True
            self.leave_to_parent()  # only has an effect in a forked child
            if waits:
                self.wait()
        finally:  # a save that still writes after an interrupt keeps the directory until its end
            self._save_slot.when_ended(self._job_sync.leave)
            ends_at = time.monotonic() + longest_s
            self._save_slot.when_ended(functools.partial(self._run.close, longest_s, until))
            self.history.finish(ends_at - time.monotonic(), until)
            if self._fast is not None:
                self._save_slot.when_ended(self._fast.tier.close)

    def _check_open(self) -> None:
        if self._closed:
            raise SettingsError(f"{self.directory}: this StepManager is closed; create a new one")
        made_in, now = self._job_sync.processes, current().processes
        if made_in != now:
            raise SettingsError(
                f"{self.directory}: the manager was created in a job of {made_in} processes, found {now}; call "
                "jax.distributed.initialize before you create the manager or the callback"
            )

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"StepManager({self.directory!r}, restored_step={self.restored_step}{closed})"

    def __enter__(self) -> StepManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress_secondary(error, self.directory):
            self.close()
