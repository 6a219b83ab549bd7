"""CheckpointCallback: the loop's one object. Resumes, saves when it is due, and leaves in time when asked to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from jaxckpt_train import hydra_job
from jaxckpt_train.checkpoint import load
from jaxckpt_train.checkpointables.grain_iterator import mark_absl_flags_parsed, with_fingerprint
from jaxckpt_train.checkpointables.saving import SaveTimes, stage_all
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import CheckpointError, Preempted, SettingsError
from jaxckpt_train.multihost import current
from jaxckpt_train.progress import progress_line, wants_progress
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.hooks import LoopHook
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.policy_choice import choose_preservation_policy, choose_save_policy
from jaxckpt_train.steps.policy_context import PreservationPolicy, SavePolicy
from jaxckpt_train.steps.preemption import PreemptionWatch
from jaxckpt_train.steps.step_names import check_step
from jaxckpt_train.steps.step_save import SaveResult

_log = logging.getLogger("jaxckpt_train")
_NOT_DUE = SaveResult(False, "not due")
_DISABLED = SaveResult(False, "disabled")
_MISSING: Any = object()


class CheckpointCallback:
    """Checkpointing of one training loop.

    Example:
        with CheckpointCallback("runs/a", save_interval_steps=500, keep_latest=3) as ckpt:
            state, data = ckpt.resume(state, iter(dataset))
            for step in ckpt.steps(num_steps):
                state, metrics = train_step(state, next(data))
                ckpt(state, metrics=metrics)

    Args: those of `CheckpointConfig`, which documents each.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(
        self,
        directory: str,
        *,
        save_interval_steps: int | None = None,
        save_interval_secs: float | None = None,
        save_policy: SavePolicy | None = None,
        keep_latest: int | None = None,
        keep_every_steps: int | None = None,
        keep_best: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_policy: PreservationPolicy | None = None,
        save_on_exit: bool = True,
        save_initial: bool = False,
        if_busy: Literal["wait", "skip"] = "wait",
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2"),
        notice_file: str | None = None,
        max_run_time_s: float | None = None,
        grace_period_s: float = 30.0,
        exit_code: int = 75,
        on_preemption: Literal["exit", "raise", "auto"] = "auto",
        fingerprint: str | None = None,
        init_from: str | None = None,
        progress: bool | Literal["auto"] = "auto",
        enabled: bool = True,
        store: StoreSettings | None = None,
    ) -> None:
        self.enabled = enabled
        mark_absl_flags_parsed()  # now: `iter(dataset)` in the call of `resume` may need it already
        self._save_on_exit, self._save_initial = save_on_exit, save_initial
        self._grace_period_s, self._exit_code, self._on_preemption = grace_period_s, exit_code, on_preemption
        self._fingerprint, self._progress, self._init_from = fingerprint, progress, init_from
        self._warn_about(directory)
        self.manager = StepManager(
            hydra_job.resolve_directory(directory),
            save_decision_policy=choose_save_policy(save_interval_steps, save_interval_secs, save_policy),
            preservation_policy=choose_preservation_policy(
                keep_latest, keep_every_steps, keep_best, best_metric, best_mode, keep_policy
            ),
            settings=store,
            if_busy=if_busy,
        )
        self._watch = PreemptionWatch(
            current(), signals=tuple(signals), notice_file=notice_file, max_run_time_s=max_run_time_s
        )
        self._started = self._closed = False
        self._completed = 0
        self._saved: int | None = None
        self._given: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None
        self._last_step = 0
        self._last_metrics: Mapping[str, Any] | None = None
        self._in_steps = self._called = self._broken = False
        self._preempted: Preempted | None = None

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
            data: the iterator that the loop takes batches from; set to the position after the last consumed batch.
            more: further checkpointables by name.

        Returns:
            What was given, restored, in the order given: `state`, or a tuple if there was more.

        Raises:
            MismatchError: the saved state does not fit; nothing was changed.
            CorruptCheckpointError: there are steps, and none is whole.
            DirectoryLockedError: another live job saves there.
        """
        self._given = {"state": state} | ({} if data is None else {"data": data}) | more
        if self.enabled:
            self._start()
            if data is not None:
                stage_all({"data": data}, SaveTimes())  # an iterator that cannot be saved is told now, not at step 500
            if self.manager.latest is not None:
                self._restore()
            else:
                self._initialise()
        values = tuple(self._given.values())
        return values[0] if len(values) == 1 else values

    def _initialise(self) -> None:
        """A fresh start: take the state from elsewhere if that was asked for, and save step 0 if that was."""
        if self._init_from is not None:
            self._given["state"] = load(hydra_job.resolve_directory(self._init_from), self._given["state"])
            _log.info("initialised the state from %s", self._init_from)
        if self._save_initial:
            self._last = self._given
            self._save("initial")

    def _restore(self) -> None:
        shown, total = wants_progress(self._progress), None
        if shown:
            with contextlib.suppress(CheckpointError):  # a damaged step: the restore finds out, and tells
                total = self.manager.metadata().bytes
        with with_fingerprint(self._fingerprint), progress_line("restoring", total, shown) as advance:
            self._given = self.manager.restore(self._given, progress=advance)
        restored = self.manager.restored_step
        assert restored is not None
        self._completed = self._saved = restored
        _log.info("resumed from step %d of %s", restored, self.manager.directory)

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the updates still to do, from the restored count; ends early once a preemption is saved.

        Args:
            num_steps: how many updates the whole training has.
        """
        self._start()
        try:
            self._in_steps = True
            while self._completed < num_steps and not self._must_stop():
                self._called = False
                self._completed += 1
                self._broken = True
                yield self._completed - 1
                self._broken = False
        finally:
            self._in_steps = False

    def _must_stop(self) -> bool:
        """Between two steps: leave if asked to, as soon as the last update is saved or there is none."""
        if self._preempted is None and self.enabled and self._watch.reached():
            if self._called or self._last is None:
                self._leave()
        return self._preempted is not None

    def __call__(
        self, state: Any = _MISSING, *, metrics: Mapping[str, Any] | None = None, step: int | None = None, **more: Any
    ) -> SaveResult:
        """Tell that an update is complete; saves it if that is due. Cheap if not: no device value is read.

        Args:
            state: the new state; without it, what `resume` was given (NNX objects).
            metrics: numbers to record if the step is saved, and for policies that decide by them.
            step: number of completed updates, for loops that do not use `steps`.
            more: further checkpointables that replace those given to `resume`.

        Raises:
            SystemExit, Preempted: outside of `steps`, once a preemption is saved.
            The original error of an earlier save that failed in the background.
        """
        if not self.enabled:
            return _DISABLED
        if step is not None:
            self._completed = check_step(step)
        elif not self._in_steps or self._called:
            self._completed += 1
        self._called, self._last_step = True, self._completed
        if state is _MISSING and not more:
            self._last = self._given
        else:
            replaced = more if state is _MISSING else {"state": state, **more}
            self._last = {**self._given, **replaced}
        self._last_metrics = metrics
        if not self._started:
            self._start()
        if self._watch.reached():
            return self._leave()
        self.manager.check()
        decision = self.manager.decide(self._completed, metrics)
        if not decision.save or self._completed == self._saved:
            return _NOT_DUE
        return self._save(decision.reason)

    def poll(self) -> bool:
        """Notice a preemption inside an evaluation or warm-up; saves the last completed update if that is safe.

        Returns:
            Whether the job was asked to leave: stop evaluating then. Once a batch may be taken for the next update (in
            a loop without `steps`: always), the position in the data is a later one: the next `ckpt(...)` saves.
        """
        if not self.enabled or self._preempted is not None:
            return self._preempted is not None
        asked = self._watch.reached()
        if asked and ((self._in_steps and self._called) or self._last is None):
            self._leave()
        return asked

    def save_now(self) -> SaveResult:
        """Save the last completed update, whatever the policy says, if it is not saved yet.

        Raises:
            SettingsError: no update was completed yet, or the next one has begun.
        """
        if not self.enabled:
            return _DISABLED
        if self._last is None:
            raise SettingsError("save_now: expected a completed update to save; call ckpt(state) first")
        if self._saved == self._last_step:
            return SaveResult(False, f"step {self._last_step} is saved already")
        if self._has_begun_another():
            raise SettingsError(
                f"save_now: update {self._completed} has begun, and the position in the data is that of no completed "
                "update any more; call it right after ckpt(state)"
            )
        return self._save("save_now", force=True)

    def _has_begun_another(self) -> bool:
        """Whether `steps` has begun an update that `ckpt(...)` was not told of."""
        return self._last_step != self._completed or (self._broken and not self._called)

    def _save(self, reason: str, *, force: bool = False) -> SaveResult:
        assert self._last is not None
        step = self._last_step
        with with_fingerprint(self._fingerprint):
            result = self.manager.save(step, self._last, metrics=self._last_metrics, force=force, reason=reason)
        if result.saved:
            self._saved = step
        return result

    def _leave(self) -> SaveResult:
        """Save the last completed update, wait until it is durable, and end the loop."""
        self.manager.reached_preemption = True
        failure = self.manager.settle(self._watch.left_of(self._grace_period_s))
        if failure is not None:
            _log.error("the save before failed; now saving step %d", self._last_step, exc_info=failure)
            self._saved = self.manager.latest
        result = SaveResult(False, "nothing new to save")
        if self._last is not None and self._saved != self._last_step:
            result = self._save(f"preemption: {self._watch.reason}", force=True)
            with progress_line(f"saving step {self._last_step}", None, wants_progress(self._progress)):
                self.manager.wait(self._watch.left_of(self._grace_period_s))
        saved = "no step was completed" if self._saved is None else f"step {self._saved} is saved"
        self._preempted = Preempted(f"asked to leave by {self._watch.reason}; {saved}", self._saved, self._exit_code)
        _log.warning("%s", self._preempted)
        self.manager.note_preemption(self._saved, str(self._watch.reason))
        if not self._in_steps and self._called:
            self.close()
            raise self._exit_error()
        return result

    def _exit_error(self) -> BaseException:
        assert self._preempted is not None
        raises = self._on_preemption == "raise" or (self._on_preemption == "auto" and hydra_job.is_multirun())
        return self._preempted if raises else SystemExit(self._exit_code)

    @property
    def preempted(self) -> bool:
        """Whether the job was asked to leave and its state is saved."""
        return self._preempted is not None

    @property
    def completed_steps(self) -> int:
        """How many updates are complete."""
        return self._completed

    def should_save(self, step: int) -> bool:
        """Whether the save policy asks for this step."""
        return self.enabled and self.manager.should_save(step)

    def save(self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None, force: bool = False) -> bool:
        """Save a step if it is due, as other managers' `save` does; the state is any pytree."""
        result = self(state, metrics=metrics, step=step)
        return result.saved or (force and self.save_now().saved)

    def latest_step(self) -> int | None:
        """The step that was committed last."""
        return self.manager.latest if self.enabled else None

    def wait_until_finished(self) -> None:
        """Wait until the save under way is committed."""
        self.manager.wait()

    def as_hook(self, get_state: Any) -> LoopHook:
        """A hook for loops that call `hook(step, t=None)` after each step, as clu's periodic actions are called.

        Args:
            get_state: a function without arguments that returns the state to save.
        """
        return LoopHook(self, get_state)

    def on_step(self, info: Any, force: bool = False) -> None:
        """A hook in Levanter's form: `info.state` after step number `info.step`, counted from 0."""
        self.save(int(info.step) + 1, info.state, force=force)

    def _start(self) -> None:
        if self._closed:
            raise SettingsError("this CheckpointCallback is closed; make a new one")
        if not self._started:
            if self.enabled:
                self.manager.own()
                self._watch.start()
            self._started = True

    def _warn_about(self, directory: str) -> None:
        problem = hydra_job.hydra_directory_problem(directory) if self.enabled else None
        if problem is not None:
            _log.warning("%s", problem)

    def close(self) -> None:
        """Wait for what is under way, put signal handlers back, and let go of the directory. Saves nothing new.

        Raises:
            The original error of a save that failed.
        """
        if not self._closed:
            self._closed = True
            try:
                if self.enabled:
                    with progress_line("finishing the save", None, wants_progress(self._progress)):
                        self.manager.close()
            finally:
                self._watch.stop()  # only now: until the save is committed, a signal must not kill the process

    def __enter__(self) -> CheckpointCallback:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._save_last()
            self.close()
        except BaseException as failure:
            if error is None:
                raise
            _log.exception("closing %s failed while another error was on its way", self.manager.directory)
            error.add_note(f"besides, closing {self.manager.directory} failed: {failure}")
        if error is None and self._preempted is not None:
            raise self._exit_error()

    def _save_last(self) -> None:
        """On a normal end: the last completed update, exactly once."""
        if not self.enabled or not self._save_on_exit or self._closed:
            return
        if self._last is None or self._saved == self._last_step:
            return
        if self._has_begun_another():
            _log.warning(
                "step %d is not saved at the end: since ckpt(...) was told of it, the loop has begun another update, "
                "so the position in the data is a later one; the last saved step is %s",
                self._last_step,
                self._saved,
            )
            return
        self._save("end of the loop", force=True)
