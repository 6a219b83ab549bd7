"""CheckpointCallback: the object that a training loop uses to resume, to save, and to stop after a preemption."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from jaxckpt_train._validation import whole
from jaxckpt_train.checkpoint import load
from jaxckpt_train.checkpointables.base import NOTHING
from jaxckpt_train.checkpointables.grain import mark_absl_flags_parsed
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, with_fingerprint
from jaxckpt_train.config import (
    CallbackOptions,
    callback_arguments,
    hydra_directory_problem,
    is_multirun,
    path_and_options,
    resolve_directory,
    run_directory,
    takes_fields_of,
)
from jaxckpt_train.distributed.jax_service import current, preemption_service
from jaxckpt_train.errors import (
    CheckpointExistsError,
    Preempted,
    SettingsError,
    UnsupportedLeafError,
    is_success,
    suppress_secondary,
)
from jaxckpt_train.inspection.units import progress_line, wants_progress
from jaxckpt_train.loop import (
    LoopState,
    current_observer,
    make_values,
    preservation_policy,
    refuse_abstract_values,
    refuse_unsavable,
    restore_values,
    save_policy,
    trace_values,
)
from jaxckpt_train.manager import StepManager
from jaxckpt_train.metrics.events import Sink
from jaxckpt_train.policies.context import Decision, SavePolicy
from jaxckpt_train.policies.save import has_temporary
from jaxckpt_train.preemption.shutdown import NOTHING_NEW, GracefulShutdown, Outcome
from jaxckpt_train.preemption.sources import NoticeSource
from jaxckpt_train.run.goodput import Goodput, print_goodput
from jaxckpt_train.run.history import CLOSED, FINISHED, savable_metrics
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.run.saving import Drift, SaveResult
from jaxckpt_train.store.committed import UNREADABLE

_log = logging.getLogger("jaxckpt_train")
_NOT_DUE, _DISABLED = SaveResult(False, "not due"), SaveResult(False, "disabled")


class CheckpointCallback:
    """Checkpointing for one training loop. The README shows it in use.

    Args: the fields of `CallbackOptions`, which documents each of them.

    Raises:
        SettingsError: an argument is wrong.
    """

    @takes_fields_of(CallbackOptions)
    def __init__(self, options: CallbackOptions) -> None:
        self._options = options = options.built()
        self.enabled = options.enabled
        mark_absl_flags_parsed()  # `iter(dataset)` as an argument of `resume` may need it
        policy = save_policy(options)
        self._leaves_temporary = has_temporary(policy)
        self.manager = _make_manager(options, policy)
        self._shutdown = _make_shutdown(options, self.manager)
        self._started = self._closed = self._resumed = False
        self._made_at, self._last_label = time.monotonic(), 0
        self._saved: int | None = None
        self._failed_with: str | None = None
        self._loop = LoopState(options.enabled, options.save_on_error, options.fingerprint)

    @classmethod
    def from_config(cls, config: Any = None) -> CheckpointCallback:
        """Create a callback from a Hydra or OmegaConf node, a mapping, or a CheckpointConfig.

        Raises SettingsError if a key or value is wrong.
        """
        return cls(**callback_arguments(config))

    def resume(self, state: Any, data: Any = None, **more: Any) -> Any:
        """Restore the newest valid step, if there is one.

        Args:
            state: the state to save and the target of a restore: a pytree, a train state, or NNX objects, which are
                restored in place. It can be a function without arguments that makes the state. The callback calls this
                function on a fresh start only; otherwise it traces it for shapes, dtypes and shardings. A fresh state
                and a restored one are then never in memory at the same time.
            data: the iterator that the loop takes batches from. A restore sets it to the position after the last
                consumed batch.
            more: additional checkpointables by name.

        Returns:
            The restored values in the order of the arguments: `state` alone, or a tuple if there are several.

        Raises:
            MismatchError: the saved state does not fit; no array was read.
            SettingsError: there is no step to restore, and the state contains a jax.ShapeDtypeStruct instead of an
                array.
            CorruptCheckpointError: the run has steps, and none of them is valid.
            DirectoryLockedError: another live job saves to the directory.
            SystemExit, Preempted: the job was asked to stop during the load, and a grace period is set.
        """
        values = {"state": state} | ({} if data is None else {DATA_NAME: data}) | more
        self._loop.begin(values)
        if self.enabled:
            self._start()
            self._resumed, self.manager.is_in_loop = True, False
            self.manager.on_all("checking the data iterator", lambda: refuse_unsavable(data))
            with self._shutdown.leaving_a_load():
                values = self._begin(values)
                resume_s = time.monotonic() - self._made_at
                self.manager.note_resume(self._saved or 0, resume_s)
            self._loop.begin(values, completed=self._saved or 0)
            self._last_label = self._saved or 0
            if (observer := current_observer()) is not None:
                values = observer.resumed(self.manager, values)
            self.manager.is_in_loop = True
        else:
            values = make_values(values)
            self._loop.begin(values)
        found = tuple(values.values())
        return found[0] if len(found) == 1 else found

    def _begin(self, values: dict[str, Any]) -> dict[str, Any]:
        """Restore the run, or start it afresh and save step 0 if `save_initial` is set."""
        manager = self.manager
        if manager.latest is not None or manager.damaged:
            values = self._restore(values)
            self._saved, manager.drift = manager.restored_step, Drift(values)
            return values
        self._saved = None  # an earlier call of `resume` may have set it, and its save failed
        values = self._initialise(values)
        manager.drift = Drift(values)
        if self._options.save_initial:
            self._loop.record(values, None)
            self._save("initial")
        return values

    def _restore(self, values: dict[str, Any]) -> dict[str, Any]:
        """Restore the newest valid step of the run; `manager.restored_step` then names the step."""
        manager, shown = self.manager, wants_progress(self._options.progress)
        total: int | None = None
        if shown:
            with contextlib.suppress(*UNREADABLE):  # the restore will report it
                total = manager.metadata().bytes
        with with_fingerprint(self._options.fingerprint), progress_line("restoring", total, shown) as advance:
            values = restore_values(manager, trace_values(values), self._options.data_on_mismatch, advance)
        _log.info("resumed from step %s of %s", manager.restored_step, manager.directory)
        manager.drain_newest()
        return values

    def _initialise(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a fresh run: call the functions that make values, and load `init_from` if it is set."""
        manager = self.manager
        manager.check_fresh(allow_flax=self._options.init_from is not None)
        if self._options.init_from is not None:
            given, options = path_and_options(self._options.init_from)
            path, settings = resolve_directory(given), self._options.store
            keeps_some = {"only", "missing"} & options.keys()
            like = (make_values if keeps_some else trace_values)({"state": values["state"]})["state"]
            values["state"] = manager.on_all(
                "loading", lambda: load(path, like, donatable=True, settings=settings, **options)
            )
            _log.info("initialised the state from %s", given)
        values = make_values(values)
        refuse_abstract_values(values, manager.directory)
        return values

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yield the numbers of the remaining of `num_steps` updates, starting at the restored count.

        The iterator ends early once the save for a preemption is complete.
        """
        self._start()
        self._refuse_unless_resumed()
        return self._loop.updates(num_steps, self._must_stop)

    def _must_stop(self) -> bool:
        """Stop between two updates if asked to, without a save: in `zip(data, ckpt.steps(n))` the data is ahead."""
        if not self.preempted and self.enabled and self._shutdown.must_leave():
            if self._loop.last is None or self._is_saved():
                self._leave()
        return self.preempted

    def __call__(
        self, state: Any = NOTHING, *, metrics: Mapping[str, Any] | None = None, step: int | None = None, **more: Any
    ) -> SaveResult:
        """Report a completed update, and save it if a save is due.

        If no save is due, the call is cheap: it reads no value from a device.

        Args:
            state: the new state. Without it, the callback saves what `resume` received (NNX objects).
            metrics: numbers to record if the step is saved. Policies can decide by them.
            step: the number of completed updates, for loops that do not use `steps`.
            more: additional checkpointables, which replace those given to `resume`.

        Raises:
            SystemExit, Preempted: outside of `steps`, once the save for a preemption is complete.
            Exception: the original error of an earlier save that failed in the background. The save that is due has
                already started.
        """
        if not self.enabled:
            self._loop.count(step)
            return _DISABLED
        self._start()
        self._refuse_unless_resumed()
        self._loop.count(step)
        self._loop.record(more if state is NOTHING else {"state": state, **more}, metrics)
        if (observer := current_observer()) is not None:
            observer.update_completed(self.manager, self._loop)
        if self._shutdown.must_leave():
            self.manager.note_completed(self._loop.step)
            return self._leave()
        with self.manager.deferring_errors():
            self.manager.check()
            decision, is_last = self._decide(metrics)
            if not decision.save or self._is_saved():
                return _NOT_DUE
            temporary = decision.temporary and not is_last
            result = self._save(decision.reason, force=is_last, temporary=temporary, fast_only=decision.fast)
        # In `steps`, a save that has started is finished between two updates.
        return self._leave() if self._shutdown.must_leave() and not (result.saved and self._loop.in_steps) else result

    def _decide(self, metrics: Mapping[str, Any] | None) -> tuple[Decision, bool]:
        """Return the decision of the policy, and whether this is the last update, which is saved in any case.

        If the loop does not report each multiple of `save_interval_steps`, the first step after one is saved.
        """
        loop, before, interval = self._loop, self._last_label, self._options.save_interval_steps
        step = self._last_label = loop.completed
        decision = self.manager.decide(step, metrics)
        passed = interval is not None and step // interval > before // interval
        if interval is not None and passed and (decision.temporary or decision.fast or not decision.save):
            why = f"save_interval_steps={interval}: the first step after {step // interval * interval}"
            decision = Decision(True, why)
        # Save the last update here and not at the exit: here the data is certain to be at this step's position.
        is_last = self._options.save_on_exit and loop.in_steps and step == loop.num_steps
        is_due = decision.save and not decision.fast
        return (Decision(True, "end of the loop") if is_last and not is_due else decision), is_last

    def _refuse_unless_resumed(self) -> None:
        """Refuse to continue an existing run if the loop forgot to resume and started from scratch."""
        if self.enabled and not self._resumed:
            if self.manager.latest is not None:
                raise SettingsError(
                    f"{self.manager.directory}: the run has step {self.manager.latest}, but the loop did not resume; "
                    "call ckpt.resume(state, data) first or choose another directory"
                )
            with self._shutdown.leaving_a_load():
                self.manager.check_fresh()
            self._resumed = self.manager.is_in_loop = True

    def _is_saved(self) -> bool:
        """Return whether the last completed update is committed or being saved. A failed save does not count."""
        return self._saved == self._loop.step and self.manager.is_saved(self._loop.step)

    def poll(self) -> bool:
        """Check for a preemption inside an evaluation or a warm-up, and save the last completed update if that is safe.

        Return whether the job was asked to stop. If so, end the evaluation. The update is not saved here if a batch may
        already have been taken for the next one, which is always possible in a loop without `steps`. The next
        `ckpt(...)` then saves.
        """
        if not self.enabled or self.preempted:
            return self.preempted
        if (observer := current_observer()) is not None:
            observer.polled()
        asked = self._shutdown.must_leave()
        if asked and ((self._loop.in_steps and self._loop.called) or self._loop.last is None):
            self._leave()
        return asked

    def save_now(self) -> SaveResult:
        """Save the last completed update regardless of the policy, unless it is already saved.

        In an `except` block this also works while the next update is running, provided that no value of the last one
        has changed. There, the callback logs a warning if it cannot save.

        Raises:
            SettingsError: no update is complete yet, or the next one is running.
            Exception: the original error of a failed save.
        """
        if not self.enabled:
            return _DISABLED
        handled, loop = sys.exception(), self._loop
        if loop.last is not None and self._is_saved():
            return SaveResult(False, f"step {loop.step} is already saved")
        if handled is None:
            values: Mapping[str, Any] | None = None if loop.has_unreported_update() else loop.last
        else:
            values = loop.unchanged()
        if values is None:
            reason = (
                "expected a completed update; call ckpt(state) first"
                if loop.last is None
                else f"update {loop.completed} is running; call save_now() right after ckpt(state)"
            )
            if handled is None:
                raise SettingsError(f"save_now: {reason}")
            _log.warning("save_now saved nothing: %s", reason)
            return SaveResult(False, reason)
        return self._save("save_now", force=True, values=values)

    def _save(
        self,
        reason: str,
        *,
        force: bool = False,
        temporary: bool = False,
        timeout_s: float | None = None,
        values: Mapping[str, Any] | None = None,
        fast_only: bool = False,
    ) -> SaveResult:
        loop = self._loop
        assert loop.last is not None
        metrics = savable_metrics(loop.metrics) if force else loop.metrics
        with with_fingerprint(self._options.fingerprint), self.manager.deferring_errors():
            if self.manager.drift is not None and DATA_NAME in loop.replaced:
                # The loop passed a new iterator, so each epoch may end at the same position.
                self.manager.drift.warns_of_position = False
            try:
                result = self.manager.save(
                    loop.step,
                    values or loop.last,
                    metrics=metrics,
                    force=force,
                    reason=reason,
                    temporary=temporary,
                    timeout_s=timeout_s,
                    fast_only=fast_only,
                )
            except (CheckpointExistsError, SettingsError) as error:
                if self._saved is None or loop.step > self._saved:
                    raise
                raise type(error)(  # a loop can neither overwrite nor restore while it runs
                    f"{self.manager.directory}: expected a step above {self._saved}, which is already saved, found "
                    f"{loop.step}: number the updates over the whole training (use ckpt.steps(...), or start at "
                    "ckpt.completed_steps after a resume). To train on from an earlier step, pass it as `init_from` "
                    "to a run in a new directory, or use jaxckpt_train.StepManager with restore(step=...)"
                ) from error
            self._saved = loop.step if result.saved else self._saved
        return result

    def _leave(self) -> SaveResult:
        """Save the last completed update, wait until it is durable, and end the loop."""
        with progress_line(f"saving step {self._loop.step}", None, wants_progress(self._options.progress)):
            result = self._shutdown.finish(self._save_before_leaving)
        self._shutdown.decide()
        if self._loop.called and not self._loop.in_steps:
            error = self._shutdown.error()
            self.close()
            raise error
        return result

    def _unsaved(self) -> int | None:
        """Return the last completed update, unless it is committed or being saved."""
        return None if self._loop.last is None or self._is_saved() else self._loop.step

    def _save_before_leaving(self, values: Mapping[str, Any] | None = None) -> SaveResult:
        shutdown, step = self._shutdown, self._unsaved()
        if step is None:
            self.manager.drain_newest()
            return NOTHING_NEW
        if not shutdown.has_time_to_save(step):
            return SaveResult(False, shutdown.plan)
        reason, temporary = f"preemption: {shutdown.reason}", self._leaves_temporary
        return self._save(reason, force=True, temporary=temporary, timeout_s=shutdown.left_s(), values=values)

    @property
    def preempted(self) -> bool:
        """Whether the job was asked to stop, and its state is saved or the time has run out."""
        return self._shutdown.preempted is not None

    @property
    def completed_steps(self) -> int:
        """The number of completed updates, without an update that the loop has not yet reported."""
        return self._loop.complete

    def summary(self, *, show: bool = True) -> Goodput:
        """Return the fraction of the run's time that went into updates that count, over all its processes so far.

        With `show`, the primary process also prints the result as a table. Raises CorruptCheckpointError or
        StorageError if the history cannot be read.
        """
        found = self.manager.goodput() if self.enabled else Goodput()
        if show and self.enabled and self.manager.is_primary:
            print_goodput(found)
        return found

    def should_save(self, step: int) -> bool:
        """Return whether the save policy asks for this step."""
        return self.enabled and self.manager.should_save(step)

    def save(self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None, force: bool = False) -> bool:
        """Save a step if it is due, like `save` of other checkpoint managers. The state is any pytree."""
        result = self(state, metrics=metrics, step=step)
        return result.saved or (force and self.save_now().saved)

    def latest_step(self) -> int | None:
        """Return the last committed step."""
        return self.manager.latest if self.enabled else None

    def all_steps(self) -> list[int]:
        """Return the committed steps in ascending order."""
        return self.manager.steps if self.enabled else []

    def wait_until_finished(self) -> None:
        """Wait until the running save is committed.

        Raises:
            SystemExit, Preempted: the job was asked to stop meanwhile, and the save did not commit within the grace
                period.
            Exception: the original error of the save, if it failed.
        """
        self._shutdown.wait()

    wait = wait_until_finished

    def as_hook(
        self,
        get_state: Callable[[], Any],
        *,
        get_metrics: Callable[[], Mapping[str, Any] | None] | None = None,
        first_step: int = 1,
    ) -> Callable[..., bool]:
        """Return a hook for loops that call `hook(step, t=None)` after each update, like clu's periodic actions.

        Args:
            get_state: a function without arguments that returns the state to save.
            get_metrics: a function without arguments that returns the metrics. None: no metrics.
            first_step: the `step` that the loop passes after its first update: 1, as in clu's documentation, or 0, as
                in Flax's examples, which call `hook(step)` inside `for step in range(...)`.

        Returns:
            The hook. It returns whether the step is being saved, and raises SettingsError if `step` is not the number
            of an update.
        """
        functions: dict[str, Any] = {
            "get_state": get_state,
            "get_metrics": dict if get_metrics is None else get_metrics,
        }
        for name, given in functions.items():
            if not callable(given):
                kind = type(given).__name__  # name only its type: the value may be a whole state
                raise SettingsError(
                    f"as_hook: {name}: expected a function without arguments, found an object of {kind}"
                )
        first = whole(0, 1)("as_hook: first_step", first_step)

        def hook(step: int, t: float | None = None) -> bool:
            number = whole(first)("hook(step), with first_step=0 if the loop counts from 0", step)
            metrics = None if get_metrics is None else get_metrics()
            return self(get_state(), metrics=metrics, step=number + 1 - first).saved

        return hook

    def on_step(self, info: Any, force: bool = False) -> None:
        """The callback as a hook of Levanter: `trainer.add_hook(ckpt.on_step, every=1)`.

        Args:
            info: an object with `state`, and with `step`, the number of the update, counted from 0. If the state has an
                attribute `saveable_state`, that is saved instead.
            force: save regardless of the policy.
        """
        if not (hasattr(info, "state") and hasattr(info, "step")):
            found = f"an object of {type(info).__name__}"
            raise SettingsError(f"on_step: info: expected an object with `state` and `step`, found {found}")
        step = whole(-1)("on_step: info.step", info.step)
        self.save(step + 1, getattr(info.state, "saveable_state", info.state), force=force)

    def _start(self) -> None:
        if self._closed:
            raise SettingsError("this CheckpointCallback is closed; create a new one")
        if not self._started:
            if self.enabled:
                self.manager.own()
                self._shutdown.start()
            self._started = True

    def close(self) -> None:
        """Wait for the running save, restore the signal handlers, and release the directory. Does not save.

        Raises the original error of a failed save.
        """
        if self._closed:
            return
        self._closed = True
        if not self.enabled:
            self._shutdown.stop()
            return
        if not self.preempted:
            self.manager.ends_as(self._failed_with or (FINISHED if self._loop.finished() else CLOSED))
        with progress_line("finishing the save", None, wants_progress(self._options.progress)):
            self._shutdown.close()

    def __repr__(self) -> str:
        state = "" if self.enabled else ", enabled=False"
        state += ", closed" if self._closed else ""
        steps = f"completed_steps={self.completed_steps}, saved={self._saved}"
        return f"CheckpointCallback({self.manager.directory!r}, {steps}{state})"

    def __enter__(self) -> CheckpointCallback:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving: BaseException | None = None
        self._failed_with = _failure(error)
        self._shutdown.ends_process |= isinstance(error, SystemExit)
        with suppress_secondary(error, self.manager.directory), contextlib.closing(self):
            try:
                leaving = self._end() if error is None else self._end_after(error)
            except BaseException as failed:
                self._failed_with = self._failed_with or _failure(failed)
                raise
        if leaving is not None:
            raise leaving from error
        if isinstance(error, StopIteration):
            raise self._loop.data_ended() from error

    def _end(self) -> BaseException | None:
        """Save the last update of a loop that ended normally; return the exception that ends a preempted loop.

        A loop that was asked to leave and has completed all its updates is not preempted, unless it has lost some.
        """
        shutdown = self._shutdown
        if self._options.save_on_exit and self._may_save():
            if self._unsaved() is None:
                self.manager.drain_newest()  # it may be on the fast tier alone
            elif self._loop.has_unreported_update():
                self._loop.warn_unsaved(self._saved)
            elif shutdown.must_leave():
                shutdown.finish(self._save_before_leaving)
            else:
                result = self._save("end of the loop", force=True)
                if not result.saved:  # the job was asked to stop while this waited for the running save
                    shutdown.finish(self._save_before_leaving)
        is_cut = self.enabled and not self.preempted and (shutdown.outcome >= Outcome.LOST or not self._loop.finished())
        if is_cut and shutdown.must_leave():
            shutdown.finish()
            shutdown.decide()
        return shutdown.error() if self.preempted else None

    def _end_after(self, error: BaseException) -> BaseException | None:
        """End a loop that has failed; return the exception to raise instead, if it was asked to leave before.

        A signal to the whole process group also kills the processes that feed the loop. The loop then fails in the
        middle of an update. If the program itself exits, its exit code is kept.
        """
        shutdown = self._shutdown
        has_tried = shutdown.outcome > Outcome.RUNNING  # then this is the error of the last save
        is_of_leaving = isinstance(error, SystemExit | Preempted) if self.preempted else has_tried
        may_leave = self.enabled and not self._closed and isinstance(error, Exception | SystemExit)
        # In a multi-process job, the other processes may continue training.
        if may_leave and not is_of_leaving and current().processes == 1 and shutdown.must_leave():
            _log.error("the loop failed after it was asked to stop by %s", shutdown.reason, exc_info=error)
            if not self.preempted:
                shutdown.finish(self._save_unchanged_before_leaving)
                shutdown.decide()
            return None if isinstance(error, SystemExit) else shutdown.error()
        if self._options.save_on_error:
            self._save_after(error)
        return None

    def _save_unchanged_before_leaving(self) -> SaveResult:
        values, lost = self._loop.unchanged(), "the next update is running and may have changed the values to save"
        if values is not None or self._unsaved() is None:
            try:
                return self._save_before_leaving(values)
            except UnsupportedLeafError as changed:  # for example, arrays that were donated to the next update
                lost = str(changed)
        self._shutdown.reach(Outcome.LOST)
        _log.error("step %d is not saved: %s; the last saved one is %s", self._loop.step, lost, self.manager.latest)
        return SaveResult(False, lost)

    def _may_save(self) -> bool:
        """Return whether the end of the loop may save its last completed update, or copy it to the run directory."""
        is_over = not self.enabled or self._closed or self.preempted or self._shutdown.outcome is Outcome.GIVEN_UP
        return not is_over and self._loop.last is not None

    def _can_save(self) -> bool:
        """Return whether there is a completed update to save at the end of the loop."""
        return self._may_save() and self._unsaved() is not None

    def _save_after(self, error: BaseException) -> None:
        """Save the last completed update after an error, if its values are unchanged. A failed save becomes a note."""
        # In a multi-process job, the other processes may continue training.
        if not isinstance(error, Exception | KeyboardInterrupt) or current().processes > 1 or not self._can_save():
            return
        values = self._loop.unchanged()
        if values is None:
            self._loop.warn_unsaved(self._saved)
            return
        try:
            self._save(f"error: {type(error).__name__}", force=True, values=values)
        except UnsupportedLeafError as changed:  # for example, arrays that were donated to the next update
            error.add_note(f"step {self._loop.step} is not saved: {changed}")


def _make_manager(options: CallbackOptions, policy: SavePolicy) -> StepManager:
    """Return the manager of the run, and warn if the next start of the same command would not find the directory."""
    problem = hydra_directory_problem(options.directory) if options.enabled else None
    if problem is not None:
        _log.warning("%s", problem)
    return StepManager(
        run_directory(options.directory),
        save_decision_policy=policy,
        preservation_policy=preservation_policy(options),
        best_link=BestLink(str(options.best_metric), options.best_mode) if options.best_link else None,
        fast_tier=options.fast_tier,
        frozen=options.frozen,
        settings=options.store,
        if_busy=options.if_busy,
        stall_timeout_s=options.stall_timeout_s,
        if_stalled=options.if_stalled,
        sinks=cast("Sequence[Sink]", options.sinks),
    )


def _make_shutdown(options: CallbackOptions, manager: StepManager) -> GracefulShutdown:
    """Return the object that stops the loop; with a grace period, it also limits the manager's own waits."""
    shutdown = GracefulShutdown(
        manager,
        current(),
        service=preemption_service() if options.enabled else None,
        signals=options.signals,
        notice_file=options.notice_file,
        max_run_time_s=options.max_run_time_s,
        sources=cast("Sequence[NoticeSource]", options.notices),
        grace_period_s=options.grace_period_s,
        exit_code=options.exit_code,
        raises=options.on_preemption == "raise" or (options.on_preemption == "auto" and is_multirun()),
    )
    if options.grace_period_s is not None:
        manager.leave_when(shutdown.is_asked, shutdown.is_time_up)
    return shutdown


def _failure(error: BaseException | None) -> str | None:
    return None if error is None or is_success(error) else type(error).__name__
