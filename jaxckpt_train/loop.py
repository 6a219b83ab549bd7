"""The parts of CheckpointCallback that concern the training loop.

`LoopState` knows which updates are complete and which values belong to the last one. `LoopForms` and `LoopHook` offer
the callback in the forms of other libraries: Orbax-style managers, clu's hooks, Levanter's hooks. `LoopObserver` lets
the resume proof watch a loop. The functions at the end choose policies from flat arguments and restore the loop's
values.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxckpt_train._validation import index_of, refuse, whole
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, with_fingerprint
from jaxckpt_train.checkpointables.registry import is_grain_iterator, is_tree_in_place, keeps_itself_current
from jaxckpt_train.checkpointables.staging import SaveTimes, StagedValue, stage_all, take
from jaxckpt_train.config import CallbackOptions
from jaxckpt_train.errors import IteratorStateError, SettingsError, UnsupportedLeafError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.preemption.shutdown import GracefulShutdown
from jaxckpt_train.run.entry import check_step
from jaxckpt_train.run.saving import SaveResult
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.reader import ReadProgress

OnMismatch = Literal["error", "restart", "skip"]
_log = logging.getLogger("jaxckpt_train")
_RESERVED = ("metrics", "step")
MAX_POSITION_TIME_SHARE = 0.01
"""The share of the loop's time that may go into recording positions unless `save_on_error` asks for them."""
_observer: LoopObserver | None = None


class LoopState:
    """Which updates of a loop are complete, and the values of the last completed one.

    Args:
        warns: whether to warn about an update that the loop does not report.
        takes_positions: whether to record the positions of all iterators at each update, so that the update can be
            saved while the next one runs. Otherwise only the positions of Grain iterators are recorded, as long as this
            takes at most 1 % of the time.
        fingerprint: the fingerprint of the data, for these positions.

    Attributes:
        completed: the number of completed updates; inside `updates`, this includes the running one.
        called: whether the loop has reported the running update.
        in_steps: whether the loop iterates over `updates`.
        in_body: whether the body of that loop is running, or was left by a `break`.
        num_steps: the number of updates of the whole training; None if the loop does not state it.
        last: the checkpointables of the last completed update by name; None before the first report.
        step: the label of that update.
        metrics: the metrics of that update.
        replaced: the names for which the loop has passed another object than before.
    """

    def __init__(self, warns: bool = True, takes_positions: bool = False, fingerprint: str | None = None) -> None:
        self._takes_positions, self._fingerprint = takes_positions, fingerprint
        self._taken: Mapping[str, StagedValue] = {}
        # Half a second is free, since the first positions import modules.
        self._taking_s, self._began_at = -0.5, time.monotonic()
        self._warns = self._warns_of_steps_back = warns
        self.completed = 0
        self.called = self.in_steps = self.in_body = False
        self.num_steps: int | None = None
        self.last: Mapping[str, Any] | None = None
        self.step = 0
        self.metrics: Mapping[str, Any] | None = None
        self._current: dict[str, Any] = {}
        self.replaced: set[str] = set()
        self._needed: frozenset[str] = frozenset()
        # The iterators whose positions are recorded. The value says whether the next element may change their state.
        self._iterators: dict[str, bool] = {}
        self._moves: bool | None = None  # whether a Grain iterator moved in each update; None: unknown so far

    def begin(self, values: Mapping[str, Any], completed: int = 0) -> None:
        """Start with new values. Values that do not change in place are not kept.

        Raises:
            SettingsError: a name is reserved for an argument of `ckpt(...)`.
        """
        for name in _RESERVED:
            if name in values:
                raise SettingsError(f"resume: a checkpointable cannot have the name {name!r}; choose another name")
        self._needed = frozenset(name for name, value in values.items() if not keeps_itself_current(value))
        self._current = {name: value for name, value in values.items() if name not in self._needed}
        self._find_iterators()
        self._taken, self._moves = {}, None
        self.last, self.metrics, self.step = None, None, 0
        self.completed, self.called, self.in_body = completed, False, False

    def updates(self, num_steps: int, must_stop: Callable[[], bool]) -> Iterator[int]:
        """Yield the numbers of the remaining updates; call `must_stop` before each of them."""
        self.num_steps = whole(0)("steps: num_steps", num_steps)
        if self._is_running() and self.complete < num_steps:  # an error or interrupt ended that update: repeat it
            self.completed, self.in_body = self.complete, False
        if self.completed > num_steps:
            _log.warning(
                "steps(%d): the run has already completed %d updates, so there is nothing to do; pass the number of "
                "updates of the whole training, not the number of remaining ones",
                num_steps,
                self.completed,
            )
        self.in_steps = True
        try:
            while self.completed < num_steps and not must_stop():
                self.called, self.in_body = False, True
                self.completed += 1
                yield self.completed - 1
                self.in_body = False
                self._warn_unless_called()
        finally:
            self.in_steps = False

    def _warn_unless_called(self) -> None:
        """Warn once about an unreported update: a loop that reports only some updates may skip those that are due."""
        if self._warns and not self.called:
            self._warns = False
            _log.warning(
                "update %d ended without a call of ckpt(...); call ckpt(state) in every update: it decides which to "
                "save, and never saves an update that is not reported",
                self.completed,
            )

    def count(self, step: int | None) -> None:
        """Count a completed update.

        Inside `updates`, or after a `break` there, it is the running update; otherwise the next one, or `step`.

        Raises:
            SettingsError: inside `updates`, `step` is not the running update.
        """
        if not self.in_steps:
            if step is not None and check_step(step) < self.complete:
                self._warn_of_a_step_back(step)
            following = self.completed + (0 if self._is_running() else 1)
            self.completed = following if step is None else check_step(step)
        elif step is not None and check_step(step) != self.completed:
            raise SettingsError(
                f"ckpt(..., step={step}): expected {self.completed}, the number of completed updates; omit `step` "
                "inside ckpt.steps()"
            )
        self.called = True

    def _warn_of_a_step_back(self, step: int) -> None:
        """Warn once, and at once: the next save, which will be refused, may be due much later."""
        if self._warns_of_steps_back:
            self._warns_of_steps_back = False
            _log.warning(
                "ckpt(...) was called for update %d after update %d; number the updates over the whole training, "
                "starting at ckpt.completed_steps after a resume; a step below the last saved one cannot be saved",
                step,
                self.completed,
            )

    def has_unreported_update(self) -> bool:
        """Return whether an unreported update has started; the data may then be at a later position."""
        return self.step != self.completed or self._is_running()

    @property
    def complete(self) -> int:
        """The number of completed updates, without the running one."""
        return self.completed - self._is_running()

    def _is_running(self) -> bool:
        """Return whether the body of `updates` runs an unreported update, or was left by a `break` during one."""
        return self.in_body and not self.called

    def warn_unsaved(self, saved: int | None) -> None:
        """Warn that the last completed update is not saved at the end, and why."""
        _log.warning(
            "step %d is not saved at the end of the loop: another update has started since, so the data may be at a "
            "later position; the last saved step is %s",
            self.step,
            saved,
        )

    def finished(self) -> bool:
        """Return whether the loop has completed all its updates."""
        return self.num_steps is not None and self.completed >= self.num_steps and not self.in_body

    def record(self, given: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> None:
        """Record the values of the completed update.

        Raises:
            SettingsError: a value that does not change in place was not passed again; the callback would save an old
                state.
        """
        missing = self._needed - given.keys()
        if missing:
            names = ", ".join(sorted(missing))
            raise SettingsError(
                f"ckpt(...) at step {self.completed}: expected the argument {names}: the value that resume() received "
                "does not change in place, so each save would store the first one; call ckpt(state), and pass others "
                "by keyword"
            )
        for name in self._current.keys() & given.keys():  # for example, an iterator for the next epoch
            if given[name] is not self._current[name]:
                self._replace(name, given[name])
        self.last = {**self._current, **given}
        if self._iterators:
            before, self._taken = self._taken, self._take_all()
            self._record_movement(before)
        else:
            self._taken = {}
        self.step, self.metrics = self.completed, metrics

    def _replace(self, name: str, value: Any) -> None:
        """Use the new value in later calls if it changes in place; otherwise require it in each call."""
        self.replaced.add(name)
        if keeps_itself_current(value):
            self._current[name] = value
        else:
            del self._current[name]
            self._needed |= {name}
        self._find_iterators()

    def _find_iterators(self) -> None:
        self._iterators = {
            name: not is_grain_iterator(value)
            for name, value in self._current.items()
            if is_grain_iterator(value) or (self._takes_positions and not is_tree_in_place(value))
        }

    def _take_all(self) -> Mapping[str, StagedValue]:
        """Return the current positions of the iterators."""
        if not self._takes_positions and self._taking_s > MAX_POSITION_TIME_SHARE * (time.monotonic() - self._began_at):
            return {}
        began = time.thread_time()
        found = dict[str, StagedValue]()
        for name, may_change in self._iterators.items():
            taken = self._take(name)
            if taken.staged.write_files is None:
                staged = copy.deepcopy(taken.staged) if may_change else taken.staged
                found[name] = dataclasses.replace(taken, staged=staged)
        self._taking_s += time.thread_time() - began
        return found

    def _record_movement(self, before: Mapping[str, StagedValue]) -> None:
        both = [name for name in self._grain_iterators() if name in before and name in self._taken]
        if both:
            self._moves = self._moves is not False and any(before[name] != self._taken[name] for name in both)

    def _grain_iterators(self) -> list[str]:
        return [name for name, may_change in self._iterators.items() if not may_change]

    def _take(self, name: str) -> StagedValue:
        with with_fingerprint(self._fingerprint):
            return take(self._current[name])

    def unchanged(self) -> Mapping[str, Any] | None:
        """Return the checkpointables of the last completed update, or None if the next one may have changed them."""
        if self.last is None or (self.num_steps is not None and not self.has_unreported_update()):
            return self.last
        if self._current.keys() - self._taken.keys() and not self._is_data_unmoved():
            return None
        given = {name: value for name, value in self.last.items() if name not in self._taken}
        if any(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in jax.tree.leaves(given)):
            return None
        return {**self.last, **self._taken}

    def _is_data_unmoved(self) -> bool:
        """Return whether no Grain iterator has moved, so that the next update has not started and nothing has changed.

        This is only known if each update so far has taken a batch. Some loops make several updates with one batch.
        """
        of_grain = [name for name in self._grain_iterators() if name in self._taken]
        return bool(self._moves and of_grain) and all(self._take(name) == self._taken[name] for name in of_grain)

    def data_ended(self) -> IteratorStateError:
        """Return the error that replaces a StopIteration that ended the loop."""
        planned = "" if self.num_steps is None else f" of {self.num_steps}"
        return IteratorStateError(
            f"the data ended at step {self.complete}{planned}: the loop raised StopIteration, as next(...) does at the "
            "end of an iterator. Repeat the data, as by iter(dataset.repeat()), or catch StopIteration if the loop may "
            "end with its data"
        )


class LoopForms(abc.ABC):
    """The methods of `CheckpointCallback` that other libraries' loops expect. All of them use its `__call__`.

    Attributes:
        enabled: whether anything is saved.
        manager: the manager of the run.
    """

    enabled: bool
    manager: StepManager
    _options: CallbackOptions
    _shutdown: GracefulShutdown

    @abc.abstractmethod
    def __call__(self, state: Any, *, metrics: Mapping[str, Any] | None = None, step: int | None = None) -> SaveResult:
        """Report a completed update."""

    @abc.abstractmethod
    def save_now(self) -> SaveResult:
        """Save the last completed update."""

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

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """Return the committed step with the best value of a metric, or None if no step has the metric.

        Args:
            metric: the name of the metric. None: `best_metric` of this callback.
            mode: "min" if lower is better, "max" if higher is better. None: `best_mode` of this callback if it is for
                the same metric; otherwise "min", but refused for a metric such as "accuracy".

        Raises:
            SettingsError: no metric is known, or its mode must be stated.
        """
        options, name = self._options, metric or self._options.best_metric
        if name is None:
            raise SettingsError(
                "best_step: expected a metric, found none; pass the argument metric, or set best_metric of the callback"
            )
        own = options.best_mode if options.best_metric in (None, name) else None
        return self.manager.best(name, mode or own) if self.enabled else None

    def load(self, step: int | None = None, like: Any = None) -> Any:
        """Load the state of a committed step. This only reads; the loop and the run continue unchanged.

        The method does not wait for a running save, and does not see its step.

        Args:
            step: the step. None: the newest valid one.
            like: the target, as for `jaxckpt_train.load`. NNX objects in it are changed in place, so pass other objects
                than those that the loop trains. None: nested dicts and lists of numpy arrays.

        Raises:
            StepNotFoundError: the step does not exist.
            CorruptCheckpointError: its bytes are not what was saved.
            MismatchError: it does not fit `like`; no array was read.
        """
        return self.manager.load({"state": like}, step)["state"]

    def wait_until_finished(self) -> None:
        """Wait until the running save is committed.

        Raises:
            SystemExit, Preempted: the job was asked to stop meanwhile, and the save did not commit within the grace
                period.
            Exception: the original error of the save, if it failed.
        """
        self._shutdown.wait()

    wait = wait_until_finished

    def as_hook(self, get_state: Any, *, get_metrics: Any = None, first_step: int = 1) -> LoopHook:
        """Return a hook for loops that call `hook(step, t=None)` after each update, like clu's periodic actions.

        Args:
            get_state: a function without arguments that returns the state to save.
            get_metrics: a function without arguments that returns the metrics. None: no metrics.
            first_step: the `step` that the loop passes after its first update: 1, as in clu's documentation, or 0, as
                in Flax's examples, which call `hook(step)` inside `for step in range(...)`.

        Raises:
            SettingsError: `first_step` is neither 0 nor 1, or a function is missing.
        """
        return LoopHook(self, get_state, get_metrics, first_step)

    def on_step(self, info: Any, force: bool = False) -> None:
        """The callback as a hook of Levanter: `trainer.add_hook(ckpt.on_step, every=1)`.

        Args:
            info: an object with `state`, and with `step`, the number of the update, counted from 0. If the state has an
                attribute `saveable_state`, that is saved instead.
            force: save regardless of the policy.

        Raises:
            SettingsError: `info` has no state, or no number of the update.
        """
        for name in ("state", "step"):
            if not hasattr(info, name):
                found = f"an object of {type(info).__name__} without `{name}`"
                raise SettingsError(f"on_step: info: expected an object with `state` and `step`, found {found}")
        step = whole(-1)("on_step: info.step", info.step)
        self.save(step + 1, getattr(info.state, "saveable_state", info.state), force=force)


class LoopHook:
    """A hook that the loop calls after each update with its own number of the update.

    Args:
        callback: the CheckpointCallback.
        get_state: returns the state to save.
        get_metrics: returns the metrics of the update. None: no metrics.
        first_step: the number that the loop passes after its first update: 1, or 0 if it counts from 0.

    Raises:
        SettingsError: `first_step` is neither 0 nor 1, or a function is missing.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        get_state: Callable[[], Any],
        get_metrics: Callable[[], Mapping[str, Any] | None] | None = None,
        first_step: int = 1,
    ) -> None:
        self._callback, self._get_state, self._get_metrics = callback, get_state, get_metrics
        _check_function("as_hook: get_state", "returns the state", get_state)
        if get_metrics is not None:
            _check_function("as_hook: get_metrics", "returns metrics, or None", get_metrics)
        self._first_step = whole(0, 1)("as_hook: first_step", first_step)

    def __call__(self, step: int, t: float | None = None) -> bool:
        """Report a completed update.

        Args:
            step: the number of the update, as the loop counts.
            t: the time. Other hooks use it; this one does not.

        Returns:
            Whether the step is being saved.

        Raises:
            SettingsError: `step` is not a whole number, or is below the number of the first update.
        """
        number = index_of(step)
        if number is None:
            refuse("hook(step)", "a whole number, the number of the update", step)
        completed = number + 1 - self._first_step
        if completed < 1:
            raise SettingsError(
                f"hook({number}): expected at least {self._first_step}, the number of the first update; if the loop "
                "counts from 0, create the hook with as_hook(get_state, first_step=0)"
            )
        metrics = None if self._get_metrics is None else self._get_metrics()
        return bool(self._callback(self._get_state(), metrics=metrics, step=completed).saved)


def _check_function(subject: str, does: str, found: object) -> None:
    if not callable(found):  # name only its type: the value may be a whole state
        kind = type(found).__name__
        raise SettingsError(f"{subject}: expected a function without arguments that {does}, found an object of {kind}")


class LoopObserver(Protocol):
    """Methods that the callback calls on the loop's thread. An error that they raise is raised from that call."""

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """The loop continues with `values`, restored from `manager.restored_step`, or starts afresh if that is None.

        Returns:
            The values for the loop; the callback keeps `values`.
        """

    def update_completed(self, manager: StepManager, loop: LoopState) -> None:
        """The loop has reported the update `loop.step`, which is not saved yet."""

    def polled(self) -> None:
        """The loop has called `ckpt.poll()`, for example in an evaluation."""


def observe(observer: LoopObserver | None) -> None:
    """Set the observer of all loops of this process; None removes it."""
    global _observer
    _observer = observer


def notify_resumed(manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
    """Call `LoopObserver.resumed`."""
    return values if _observer is None else _observer.resumed(manager, values)


def notify_update(manager: StepManager, loop: LoopState) -> None:
    """Call `LoopObserver.update_completed`."""
    if _observer is not None:
        _observer.update_completed(manager, loop)


def notify_polled() -> None:
    """Call `LoopObserver.polled`."""
    if _observer is not None:
        _observer.polled()


def refuse_unsavable(data: Any) -> None:
    """Raise UnsupportedLeafError if the data cannot be saved, so that the loop fails now and not at its first save."""
    if data is None:
        return
    try:
        stage_all({DATA_NAME: data}, SaveTimes(), StoreSettings())
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(
            "resume: data: expected an iterator with get_state() and set_state(state), which save its position, found "
            f"{type(data).__name__}; for other data pass CountedIterator(items_from), where items_from(n) returns the "
            f"items from number n on\n{error}"
        ) from None  # the text has the error


def restore_values(
    manager: StepManager, values: dict[str, Any], on_mismatch: OnMismatch, progress: ReadProgress | None
) -> dict[str, Any]:
    """Restore the newest valid step into the values of a loop.

    Args:
        manager: the manager of the run.
        values: the checkpointables by name.
        on_mismatch: what to do if the saved position of `data` does not fit its iterator, for example because another
            number of processes shares the data. "error": raise. "restart": start the data from the beginning and
            restore the rest. "skip": as "restart", then take and drop one element for each completed update.
        progress: called with the number of bytes of each read.

    Raises:
        IteratorStateError: the position does not fit, and `on_mismatch` is "error".
        As `StepManager.restore`.
    """
    data: Any = values.get(DATA_NAME)
    can_set_back = on_mismatch != "error" and hasattr(data, "get_state") and hasattr(data, "set_state")
    # In a multi-process job, some processes may accept the saved position while another one refuses it.
    before = data.get_state() if can_set_back else None
    try:
        return manager.restore(values, progress=progress)
    except IteratorStateError as error:
        if on_mismatch == "error" or DATA_NAME not in values:
            raise
        _log.warning("the data starts from the beginning (data_on_mismatch=%s): %s", on_mismatch, error)
    if can_set_back:
        manager.on_all("setting the data back", lambda: _set_back(data, before))
    rest = manager.restore({name: value for name, value in values.items() if name != DATA_NAME}, progress=progress)
    if on_mismatch == "skip":
        count = manager.restored_step or 0
        manager.on_all(f"skipping {count} elements of the data", lambda: _skip(data, count))
    return {name: rest.get(name, value) for name, value in values.items()}


def _set_back(data: Any, before: Any) -> None:
    """Set the data back to its old position, unless it is still there."""
    try:
        is_there = bool(data.get_state() == before)
    except ValueError:  # the state contains arrays
        is_there = False
    if not is_there:
        data.set_state(before)


def _skip(data: Any, count: int) -> None:
    for number in range(count):
        try:
            next(data)
        except StopIteration:
            raise IteratorStateError(
                f"data: expected {count} elements to skip, one for each completed update, found {number}; pass an "
                'iterator that repeats, or set data_on_mismatch="restart"'
            ) from None


def refuse_to_continue(directory: str, latest: int | None) -> None:
    """Raise SettingsError if the run has steps and the loop did not resume: it would continue the run from scratch."""
    if latest is not None:
        raise SettingsError(
            f"{directory}: the run has step {latest}, but the loop did not resume; call ckpt.resume(state, data) first "
            "or choose another directory"
        )
