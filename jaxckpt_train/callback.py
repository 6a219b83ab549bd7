"""CheckpointCallback: the loop's one object. Resumes, saves when it is due, and leaves in time when asked to.

Makes what a callback is composed of, from the arguments that it was given.

How a loop gets its state: from the newest step of its run, from elsewhere, or as it is.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from jaxckpt_train import config as hydra_job
from jaxckpt_train import loop as loop_observer
from jaxckpt_train.checkpoint import PathLike, load
from jaxckpt_train.checkpointables.base import NOTHING
from jaxckpt_train.checkpointables.grain import mark_absl_flags_parsed
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, with_fingerprint
from jaxckpt_train.checkpointables.state_makers import made, made_abstractly, refuse_abstract
from jaxckpt_train.config import build_notices, callback_arguments, check_arguments, path_and_options
from jaxckpt_train.distributed.jax_service import current, preemption_service
from jaxckpt_train.errors import Preempted, SettingsError, UnsupportedLeafError, is_success, suppress_secondary
from jaxckpt_train.inspection.units import progress_line, wants_progress
from jaxckpt_train.loop import (
    LoopForms,
    LoopState,
    OnMismatch,
    choose_preservation_policy,
    choose_save_policy,
    refuse_to_continue,
    refuse_unsavable,
    restore_values,
)
from jaxckpt_train.manager import StepManager
from jaxckpt_train.metrics.events import Sink, checked_sinks
from jaxckpt_train.policies.context import Decision, PreservationPolicy, SavePolicy, require_policy
from jaxckpt_train.policies.save import has_temporary
from jaxckpt_train.preemption.shutdown import NOTHING_NEW, GracefulShutdown
from jaxckpt_train.preemption.sources import NoticeSource
from jaxckpt_train.preemption.watch import PreemptionWatch
from jaxckpt_train.run.catalog import advised_for_a_loop
from jaxckpt_train.run.goodput import Goodput, print_goodput
from jaxckpt_train.run.history import CLOSED, FINISHED, savable_metrics
from jaxckpt_train.run.restoring import size_if_readable
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.run.saving import Drift, SaveResult
from jaxckpt_train.settings import STALL_TIMEOUT_S, StoreSettings

_log = logging.getLogger("jaxckpt_train")
Arguments = Mapping[str, Any]  # of CheckpointCallback by name, checked
_NOT_DUE, _DISABLED = SaveResult(False, "not due"), SaveResult(False, "disabled")


def initialise(
    manager: StepManager, values: dict[str, Any], init_from: Any, shutdown: GracefulShutdown
) -> dict[str, Any]:
    """What a fresh run begins with: functions that make a value are called; `init_from` gives the state, if it is set.

    Raises:
        CorruptCheckpointError: there are steps, and none is whole.
        SettingsError: there are steps of another tool, or checkpoints of Flax and no `init_from`; or an abstract leaf.
        MismatchError: what is loaded does not fit the state.
    """
    interruptible = shutdown.interruptible(None)
    manager.check_fresh(interruptible, beside_flax=init_from is not None)
    if init_from is not None:
        given, options = path_and_options(init_from)
        path, makes_some = hydra_job.resolve_directory(given), {"only", "missing"} & options.keys()
        like = (made if makes_some else made_abstractly)({"state": values["state"]})["state"]
        values["state"] = manager.all_do(
            "loading", lambda: load(path, like, donatable=True, progress=interruptible, **options)
        )
        _log.info("initialised the state from %s", given)
    values = made(values)
    refuse_abstract(values, manager.directory)
    return values


def restore(
    manager: StepManager,
    values: dict[str, Any],
    *,
    on_mismatch: OnMismatch,
    fingerprint: str | None,
    progress: bool | Literal["auto"],
    shutdown: GracefulShutdown,
) -> dict[str, Any]:
    """What the newest step of the run holds that is whole; `manager.restored_step` tells which one that is.

    Raises:
        MismatchError: the saved state does not fit; no array was read.
        CorruptCheckpointError: no step is whole.
    """
    shown = wants_progress(progress)
    total = size_if_readable(lambda: manager.metadata(progress=shutdown.interruptible(None))) if shown else None
    with with_fingerprint(fingerprint), progress_line("restoring", total, shown) as advance:
        values = restore_values(manager, made_abstractly(values), on_mismatch, shutdown.interruptible(advance))
    _log.info("resumed from step %s of %s", manager.restored_step, manager.directory)
    return values


def save_policy_of(given: Arguments) -> SavePolicy:
    """When it saves."""
    if given["save_policy"] is not None:
        require_policy("checkpoint.save_policy", given["save_policy"], "should_save")
    names = ("save_interval_steps", "save_interval_secs", "save_policy", "temporary_interval_secs")
    return choose_save_policy(*(given[name] for name in names))


def manager_of(given: Arguments, policy: SavePolicy) -> StepManager:
    """The manager of its run; a directory that another start of the same command would not find is warned about."""
    problem = hydra_job.hydra_directory_problem(given["directory"]) if given["enabled"] else None
    if problem is not None:
        _log.warning("%s", problem)
    if given["keep_policy"] is not None:
        require_policy("checkpoint.keep_policy", given["keep_policy"], "should_preserve")
    checked_sinks("checkpoint.sinks", given["sinks"])
    kept = ("keep_latest", "keep_every_steps", "keep_best", "best_metric", "best_mode", "keep_policy")
    return StepManager(
        hydra_job.run_directory(given["directory"]),
        save_decision_policy=policy,
        preservation_policy=choose_preservation_policy(*(given[name] for name in kept)),
        best_link=BestLink(given["best_metric"], given["best_mode"]) if given["best_link"] else None,
        settings=given["store"],
        **{name: given[name] for name in ("if_busy", "stall_timeout_s", "if_stalled", "sinks")},
    )


def watch_of(given: Arguments, manager: StepManager) -> PreemptionWatch:
    """What watches for requests to leave."""
    grace_s, limit_s = given["grace_period_s"], given["max_run_time_s"]
    return PreemptionWatch(
        current(),
        service=preemption_service() if given["enabled"] else None,
        signals=tuple(given["signals"]),
        notice_file=given["notice_file"],
        max_run_time_s=limit_s,
        sources=build_notices("checkpoint.notices", given["notices"]),
        timeout_s=manager.settings.barrier_timeout_s,
        leave_early_s=lambda: manager.leave_early_s(limit_s) if grace_s is None else float(grace_s),
    )


def shutdown_of(given: Arguments, watch: PreemptionWatch, manager: StepManager) -> GracefulShutdown:
    """How it leaves; with a grace period, the manager's own waits keep to it."""
    how, grace_s = given["on_preemption"], given["grace_period_s"]
    shutdown = GracefulShutdown(
        watch, grace_s, given["exit_code"], lambda: how == "raise" or (how == "auto" and hydra_job.is_multirun())
    )
    if grace_s is not None:
        manager.leave_when(watch.is_asked, shutdown.is_time_up)
    return shutdown


def _failure(error: BaseException | None) -> str | None:
    return None if error is None or is_success(error) else type(error).__name__


class CheckpointCallback(LoopForms):
    """Checkpointing for one training loop.

    The arguments are the fields of `CheckpointConfig`, which documents them.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        save_interval_steps: int | None = None,
        save_interval_secs: float | None = None,
        temporary_interval_secs: float | None = None,
        save_policy: SavePolicy | None = None,
        keep_latest: int | None = None,
        keep_every_steps: int | None = None,
        keep_best: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] | None = None,
        best_link: bool = False,
        keep_policy: PreservationPolicy | None = None,
        save_on_exit: bool = True,
        save_on_error: bool = False,
        save_initial: bool = False,
        if_busy: Literal["wait", "skip"] = "wait",
        stall_timeout_s: float = STALL_TIMEOUT_S,
        if_stalled: Literal["skip", "raise"] = "skip",
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2"),
        notice_file: PathLike | None = None,
        notices: Sequence[str | NoticeSource | Mapping[str, Any]] = (),
        max_run_time_s: float | None = None,
        grace_period_s: float | None = None,
        exit_code: int = 75,
        data_on_mismatch: OnMismatch = "error",
        on_preemption: Literal["exit", "raise", "auto"] = "auto",
        fingerprint: str | None = None,
        init_from: PathLike | Mapping[str, Any] | None = None,
        progress: bool | Literal["auto"] = "auto",
        enabled: bool = True,
        store: StoreSettings | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}  # there are no others yet
        check_arguments(given)
        self.enabled = enabled
        mark_absl_flags_parsed()  # now: `iter(dataset)` in the call of `resume` may need it already
        self._save_on_exit, self._save_initial, self._on_mismatch = save_on_exit, save_initial, data_on_mismatch
        self._save_on_error = save_on_error
        self._fingerprint, self._progress, self._init_from = fingerprint, progress, init_from
        policy = save_policy_of(given)
        self._leaves_temporary = has_temporary(policy)
        self.manager = manager_of(given, policy)
        self.manager.holder = weakref.ref(self)
        self._watch = watch_of(given, self.manager)
        self._shutdown = shutdown_of(given, self._watch, self.manager)
        self._started = self._closed = self._resumed = self._is_leaving = False
        self._made_at = time.monotonic()
        self._best_metric, self._best_mode = best_metric, best_mode
        self._interval, self._last_label = save_interval_steps, 0
        self._saved: int | None = None
        self._failed_with: str | None = None
        self._loop = LoopState(warns=enabled, takes_positions=save_on_error, fingerprint=fingerprint)

    @classmethod
    def from_config(cls, config: Any = None) -> CheckpointCallback:
        """Build it from a Hydra or OmegaConf node, a mapping or a CheckpointConfig.

        Raises:
            SettingsError: a key or value is wrong.
        """
        return cls(**callback_arguments(config))

    def resume(self, state: Any, data: Any = None, **more: Any) -> Any:
        """Restore the newest step that is whole, if there is one.

        Args:
            state: a pytree, train state or NNX objects (restored in place): what is saved, and the target of a restore.
                Or a function without arguments that makes it: called on a fresh start only, and else traced for shapes,
                dtypes and shardings, so that a fresh and a restored state are never in memory together.
            data: the iterator that the loop takes batches from; set to the position after the last consumed batch.
            more: further checkpointables by name.

        Returns:
            What was given, restored, in the order given: `state`, or a tuple if there was more.

        Raises:
            MismatchError: the saved state does not fit; no array was read.
            SettingsError: there is no step, and the state has a jax.ShapeDtypeStruct in place of an array.
            CorruptCheckpointError: there are steps, and none is whole.
            DirectoryLockedError: another live job saves there.
            SystemExit, Preempted: asked to leave while it loads, and there is a grace period.
        """
        values = {"state": state} | ({} if data is None else {DATA_NAME: data}) | more
        self._loop.begin(values)
        if self.enabled:
            self._start()
            self._resumed, self.manager.is_in_loop = True, False
            self.manager.all_do("looking at the data", lambda: refuse_unsavable(data))
            with self._shutdown.leaving_a_load(self.manager):
                values = self._begin(values)
                resume_s, interruptible = time.monotonic() - self._made_at, self._shutdown.interruptible(None)
                self.manager.note_resume(self._saved or 0, resume_s, interruptible)
            self._loop.begin(values, completed=self._saved or 0)
            self._last_label = self._saved or 0
            values = loop_observer.resumed(self.manager, values)
            self.manager.is_in_loop = True
        else:
            values = made(values)
            self._loop.begin(values)
        found = tuple(values.values())
        return found[0] if len(found) == 1 else found

    def _begin(self, values: dict[str, Any]) -> dict[str, Any]:
        """Begin where the run is, or anew, and save step 0 then if that was asked for."""
        manager = self.manager
        if manager.latest is not None or manager.damaged:
            more: dict[str, Any] = {"fingerprint": self._fingerprint, "progress": self._progress}
            values = restore(manager, values, on_mismatch=self._on_mismatch, shutdown=self._shutdown, **more)
            self._saved, manager.drift = manager.restored_step, Drift(values)
            return values
        self._saved = None  # of an earlier attempt, whose save has failed
        values = initialise(manager, values, self._init_from, self._shutdown)
        manager.drift = Drift(values)
        if self._save_initial:
            self._loop.told(values, None)
            self._save("initial")
        return values

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the updates still to do, from the restored count; ends early once a preemption is saved.

        Args:
            num_steps: how many updates the whole training has.
        """
        self._start()
        self._refuse_unless_resumed()
        return self._loop.updates(num_steps, self._must_stop)

    def _must_stop(self) -> bool:
        """Between two steps: leave if asked to. Saves nothing: in `zip(data, ckpt.steps(n))` the data is ahead here."""
        if self._shutdown.preempted is None and self.enabled and self._watch.reached():
            if self._loop.last is None or self._is_saved():
                self._leave()
        return self._shutdown.preempted is not None

    def __call__(
        self, state: Any = NOTHING, *, metrics: Mapping[str, Any] | None = None, step: int | None = None, **more: Any
    ) -> SaveResult:
        """Tell that an update is complete; saves it if that is due. Cheap if not: no device value is read.

        Args:
            state: the new state; without it, what `resume` was given (NNX objects).
            metrics: numbers to record if the step is saved, and for policies that decide by them.
            step: number of completed updates, for loops that do not use `steps`.
            more: further checkpointables that replace those given to `resume`.

        Raises:
            SystemExit, Preempted: outside of `steps`, once a preemption is saved.
            Exception: the original error of an earlier save that failed in the background. The save that is due has
                already started then.
        """
        if not self.enabled:
            self._loop.count(step)
            return _DISABLED
        self._start()
        self._refuse_unless_resumed()
        self._loop.count(step)
        self._loop.told(more if state is NOTHING else {"state": state, **more}, metrics)
        loop_observer.told(self.manager, self._loop)
        if self._watch.reached():
            return self._leave()
        with self.manager.telling_later():
            self.manager.check()
            decision = self._decide(metrics)
            # The last one now and not at the exit: here the position in the data is surely this step's.
            is_last = self._save_on_exit and self._loop.in_steps and self._loop.completed == self._loop.num_steps
            if not (decision.save or is_last) or self._is_saved():
                return _NOT_DUE
            if decision.save:
                result = self._save(decision.reason, force=is_last, temporary=decision.temporary and not is_last)
            else:
                result = self._save("end of the loop", force=True)
        return self._leave() if self._watch.reached() and not (result.saved and self._loop.in_steps) else result

    def _decide(self, metrics: Mapping[str, Any] | None) -> Decision:
        """What the policy says; after a multiple of `save_interval_steps` without a call the next step is due."""
        step, before, interval = self._loop.completed, self._last_label, self._interval
        decision, self._last_label = self.manager.decide(step, metrics), step
        if interval is None or step // interval <= before // interval or (decision.save and not decision.temporary):
            return decision
        return Decision(True, f"save_interval_steps={interval}: the first step after {step // interval * interval}")

    def _refuse_unless_resumed(self) -> None:
        """A loop that forgets to resume must not continue somebody's run with a state from scratch."""
        if self.enabled and not self._resumed:
            refuse_to_continue(self.manager.directory, self.manager.latest)
            with self._shutdown.leaving_a_load(self.manager):
                self.manager.check_fresh(self._shutdown.interruptible(None))
            self._resumed = self.manager.is_in_loop = True

    def _is_saved(self) -> bool:
        """Whether the last completed update is committed, or on its way: a save that failed counts for nothing."""
        return self._saved == self._loop.step and self.manager.is_saved(self._loop.step)

    def poll(self) -> bool:
        """Notice a preemption inside an evaluation or warm-up; saves the last completed update if that is safe.

        Returns:
            Whether the job was asked to leave: stop evaluating then. Once a batch may be taken for the next update (in
            a loop without `steps`: always), the position in the data is a later one: the next `ckpt(...)` saves.
        """
        if not self.enabled or self._shutdown.preempted is not None:
            return self._shutdown.preempted is not None
        loop_observer.polled()
        self.manager.refuse_replaced()
        asked = self._watch.reached()
        if asked and ((self._loop.in_steps and self._loop.called) or self._loop.last is None):
            self._leave()
        return asked

    def save_now(self) -> SaveResult:
        """Save the last completed update, whatever the policy says, if it is not saved yet.

        In an `except` block it also saves while the next update is under way, if nothing of the last one is changed;
        what cannot be saved there is a warning, and a save that fails has the exception that is handled in a note.

        Raises:
            SettingsError: no update was completed yet, or the next one is under way.
            Exception: the original error of a save that fails.
        """
        if not self.enabled:
            return _DISABLED
        self.manager.refuse_replaced()
        handled, loop = sys.exception(), self._loop
        if loop.last is not None and self._is_saved():
            return SaveResult(False, f"step {loop.step} is saved already")
        if handled is None:
            values: Mapping[str, Any] | None = None if loop.has_begun_another() else loop.last
        else:
            values = loop.unchanged()
        if values is None:
            why_not = (
                "expected a completed update to save; call ckpt(state) first"
                if loop.last is None
                else f"update {loop.completed} is under way; call it right after ckpt(state)"
            )
            if handled is None:
                raise SettingsError(f"save_now: {why_not}")
            _log.warning("save_now: nothing is saved: %s", why_not)
            return SaveResult(False, why_not)
        try:
            return self._save("save_now", force=True, values=values)
        except BaseException as failure:
            if handled is not None:
                failure.add_note(f"save_now was called while {type(handled).__name__} was handled: {handled}")
            raise

    def _save(
        self,
        reason: str,
        *,
        force: bool = False,
        temporary: bool = False,
        timeout_s: float | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> SaveResult:
        loop = self._loop
        assert loop.last is not None
        metrics = savable_metrics(loop.metrics) if force else loop.metrics
        with with_fingerprint(self._fingerprint), self.manager.telling_later():
            more: dict[str, Any] = {"metrics": metrics, "force": force, "reason": reason, "timeout_s": timeout_s}
            if self.manager.drift is not None and DATA_NAME in loop.handed_over:
                self.manager.drift.warns_of_position = False  # each epoch may end at the same one
            with advised_for_a_loop(self.manager.directory, loop.step, self._saved):
                result = self.manager.save(loop.step, values or loop.last, temporary=temporary, **more)
            self._saved = loop.step if result.saved else self._saved
        return result

    def _leave(self) -> SaveResult:
        """Save the last completed update, wait until it is durable, and end the loop."""
        self._is_leaving = True
        self.manager.leaves()
        with progress_line(f"saving step {self._loop.step}", None, wants_progress(self._progress)):
            result = self._shutdown.finish(self.manager, self._save_before_leaving, self._unsaved())
        self._shutdown.decide(self.manager)
        if not self._loop.in_steps and self._loop.called:
            error = self._shutdown.error()
            self.close()
            raise error
        return result

    def _unsaved(self) -> int | None:
        return None if self._loop.last is None or self._is_saved() else self._loop.step

    def _save_before_leaving(self, timeout_s: float | None, values: Mapping[str, Any] | None = None) -> SaveResult:
        if self._unsaved() is None:
            return NOTHING_NEW
        more: dict[str, Any] = {"temporary": self._leaves_temporary, "timeout_s": timeout_s, "values": values}
        return self._save(f"preemption: {self._watch.reason}", force=True, **more)

    @property
    def preempted(self) -> bool:
        """Whether the job was asked to leave, and has saved its state or run out of time."""
        return self._shutdown.preempted is not None

    @property
    def completed_steps(self) -> int:
        """How many updates are complete; one of which `ckpt(...)` was not told yet is not."""
        return self._loop.complete

    def summary(self, *, show: bool = True) -> Goodput:
        """Which part of the run's time went into updates that count, over all its processes so far.

        Args:
            show: print it as a table; in a job process 0 does.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read.
        """
        found = self.manager.goodput() if self.enabled else Goodput()
        if show and self.enabled and self.manager.leads:
            print_goodput(found)
        return found

    def _start(self) -> None:
        self.manager.refuse_replaced()
        if self._closed:
            raise SettingsError("this CheckpointCallback is closed; make a new one")
        if not self._started:
            if self.enabled:
                self.manager.own()
                self._watch.start()
            self._started = True

    def close(self) -> None:
        """Wait for what is under way, put signal handlers back, and let go of the directory. Saves nothing new.

        Raises:
            Exception: the original error of a save that failed.
        """
        if not self._closed:
            self._closed = True
            try:
                if self.enabled:
                    if not self.preempted:
                        self.manager.ends_as(self._failed_with or (FINISHED if self._loop.finished() else CLOSED))
                    with progress_line("finishing the save", None, wants_progress(self._progress)):
                        self._shutdown.close(self.manager)
            finally:
                self._watch.stop(leaving=self._shutdown.ends_process)  # only now: till then a signal must not kill it

    def __repr__(self) -> str:
        state = "" if self.enabled else ", enabled=False"
        state += ", closed" if self._closed else ""
        steps = f"completed_steps={self.completed_steps}, saved={self._saved}"
        return f"CheckpointCallback({self.manager.directory!r}, {steps}{state})"

    def __enter__(self) -> CheckpointCallback:
        self._start()
        self.manager.is_within = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving, self._failed_with = None, _failure(error)
        self._shutdown.ends_process |= isinstance(error, SystemExit)
        with suppress_secondary(error, self.manager.directory):
            try:
                if error is None:
                    self._save_last()
                    leaving = self._leave_unless_finished()
                else:
                    leaving = self._leave_after(error)
                    if self._save_on_error:
                        self._save_after(error)
            except BaseException as failed:
                self._failed_with = self._failed_with or _failure(failed)
                raise
            finally:
                self.close()
        if leaving is not None:
            raise leaving from error
        if isinstance(error, StopIteration):
            raise self._loop.data_ended() from error

    def _leave_unless_finished(self) -> BaseException | None:
        """What says that it has left. A loop that was asked to and broke off by itself has not finished, either."""
        left = self.enabled and self._started and not self.preempted
        if left and (self._shutdown.loses or not self._loop.finished()) and self._watch.reached():
            self._shutdown.finish(self.manager)
            self._shutdown.decide(self.manager)
        return self._shutdown.error() if self.preempted else None

    def _leave_after(self, error: BaseException) -> BaseException | None:
        """Leave after an error of the loop if the job was asked to before; what says so.

        Processes that feed the loop get the signals that are sent to the whole process group, and die of them: the loop
        fails then, in the midst of an update. An exit by the user's own code keeps its exit code.
        """
        could = self.enabled and self._started and not self._closed and isinstance(error, Exception | SystemExit)
        is_of_leaving = isinstance(error, SystemExit | Preempted) if self.preempted else self._is_leaving
        if not could or is_of_leaving or not self._watch.reached_alone():
            return None
        _log.error("asked to leave by %s, and the loop has failed since", self._watch.reason, exc_info=error)
        if not self.preempted:
            self._leave_with_what_is_unchanged()
        return None if isinstance(error, SystemExit) else self._shutdown.error()

    def _leave_with_what_is_unchanged(self) -> None:
        values, unsaved = self._loop.unchanged(), self._unsaved()
        try:
            if unsaved is not None and values is None:
                self._lose(unsaved, "the next update is under way and may have changed what is saved")
                self._shutdown.finish(self.manager)
            else:
                save = functools.partial(self._save_before_leaving, values=values)
                self._shutdown.finish(self.manager, save, unsaved)
        except UnsupportedLeafError as changed:  # such as arrays that the next update was given to reuse
            self._lose(self._loop.step, str(changed))
        self._shutdown.decide(self.manager)

    def _lose(self, step: int, why: str) -> None:
        self._shutdown.loses = True
        _log.error("step %d is not saved: %s; the last saved step is %s", step, why, self.manager.latest)

    def _save_after(self, error: BaseException) -> None:
        """On an error: the last completed update, if nothing of it is changed. A save that fails becomes a note."""
        is_over = not self.enabled or self._closed or self.preempted or self._shutdown.is_late
        is_alone = current().processes == 1  # in a job the other processes may train on
        if is_over or not is_alone or not isinstance(error, Exception | KeyboardInterrupt) or self._unsaved() is None:
            return
        values = self._loop.unchanged()
        if values is None:
            self._loop.tell_that_it_went_on(self._saved)
            return
        try:
            self._save(f"error: {type(error).__name__}", force=True, values=values)
        except UnsupportedLeafError as changed:  # such as arrays that the next update was given to reuse
            error.add_note(f"step {self._loop.step} is not saved: {changed}")

    def _save_last(self) -> None:
        """On a normal end: the last completed update, exactly once."""
        is_over = not self.enabled or self._closed or self.preempted or self._shutdown.is_late
        if is_over or not self._save_on_exit or self._loop.last is None or self._is_saved():
            return
        if self._loop.has_begun_another():
            self._loop.tell_that_it_went_on(self._saved)
        elif self._watch.reached() or not self._save("end of the loop", force=True).saved:  # asked to leave meanwhile
            self._shutdown.finish(self.manager, self._save_before_leaving, self._unsaved())
