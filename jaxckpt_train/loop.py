"""The callback in the forms that other loops know: of managers, of clu's hooks, and of Levanter's.

The callback as a hook for loops that call `hook(step)` after each step.

Who watches the loop of this process: told what it goes on from, and of each update it has completed.

Where a loop is: which updates are complete, and what it last told its callback of them.

The data of a loop that cannot go on where it was, or cannot be saved: refused, or, by request, begun anew.

Builds the policies that the flat arguments of a callback or a YAML file stand for.
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

from jaxckpt_train._validation import Mode, index_of, refuse, stated_mode, whole
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, with_fingerprint
from jaxckpt_train.checkpointables.registry import is_grain_iterator, is_tree_in_place, keeps_itself_current
from jaxckpt_train.checkpointables.saving import SaveTimes, Taken, stage_all, take
from jaxckpt_train.errors import IteratorStateError, SettingsError, UnsupportedLeafError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.context import PreservationPolicy, SavePolicy
from jaxckpt_train.policies.preservation import AnyPreservationPolicy, BestN, EveryNSteps, LatestN
from jaxckpt_train.policies.save import AnySavePolicy, EverySecondsPolicy, FixedIntervalPolicy, TemporarySavePolicy
from jaxckpt_train.preemption.shutdown import GracefulShutdown
from jaxckpt_train.run.entry import check_step
from jaxckpt_train.run.saving import SaveResult
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.reader import ReadProgress

DEFAULT_INTERVAL_SECS = 600.0
OnMismatch = Literal["error", "restart", "skip"]
_log = logging.getLogger("jaxckpt_train")
_RESERVED = ("metrics", "step")
TAKING_SHARE = 0.01
"""Of the loop's time: as much goes into taking positions that nobody has asked for."""
_observer: LoopObserver | None = None


def choose_save_policy(
    interval_steps: int | None,
    interval_secs: float | None,
    policy: SavePolicy | None,
    temporary_interval_secs: float | None = None,
) -> SavePolicy:
    """A policy that saves when any of the given reasons does; with none given, every `DEFAULT_INTERVAL_SECS`."""
    reasons: list[SavePolicy] = []
    if interval_steps is not None:
        reasons.append(FixedIntervalPolicy(interval_steps))
    if interval_secs is not None:
        reasons.append(EverySecondsPolicy(interval_secs))
    if policy is not None:
        reasons.append(policy)
    if temporary_interval_secs is not None:
        reasons.append(TemporarySavePolicy(EverySecondsPolicy(temporary_interval_secs)))
    if not reasons:
        return EverySecondsPolicy(DEFAULT_INTERVAL_SECS)
    return reasons[0] if len(reasons) == 1 else AnySavePolicy(reasons)


def choose_preservation_policy(
    latest: int | None,
    every_steps: int | None,
    best: int | None,
    metric: str | None,
    mode: Mode | None,
    policy: PreservationPolicy | None,
) -> PreservationPolicy | None:
    """A policy that keeps what any of the given reasons keeps; with none given, None: everything is kept.

    Raises:
        SettingsError: `best` without a metric.
    """
    reasons: list[PreservationPolicy] = []
    if latest is not None:
        reasons.append(LatestN(latest))
    if every_steps is not None:
        reasons.append(EveryNSteps(every_steps))
    if best is not None:
        if metric is None:
            raise SettingsError("keep_best: expected best_metric with it, the metric that says which step is better")
        reasons.append(BestN(metric, best, stated_mode("best_mode", mode, metric)))
    if policy is not None:
        reasons.append(policy)
    if not reasons:
        return None
    return reasons[0] if len(reasons) == 1 else AnyPreservationPolicy(reasons)


def refuse_unsavable(data: Any) -> None:
    """Raise UnsupportedLeafError if the data (None: there is none) cannot be saved: now, and not at the first save."""
    if data is None:
        return
    try:
        stage_all({DATA_NAME: data}, SaveTimes(), StoreSettings())
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(
            f"{error}\nresume: data: expected an iterator with get_state() and set_state(state), "
            f"which save its position, found {type(data).__name__}; for others give CountedIterator(items_from)"
        ) from error


def restore_values(
    manager: StepManager, values: dict[str, Any], on_mismatch: OnMismatch, progress: ReadProgress | None
) -> dict[str, Any]:
    """Restore the newest step that is whole into what a loop works with.

    Args:
        manager: of the run.
        values: the checkpointables by name.
        on_mismatch: what is done if the position of `data` does not fit its iterator, such as that of a share of the
            data in a job of another number of processes: "error"; "restart": the data begins anew, and the rest goes
            on; "skip": so it does, and as many elements as updates were completed are taken from it and dropped.
        progress: called with numbers of bytes.

    Raises:
        IteratorStateError: it does not fit, and "error" is asked for.
        As `StepManager.restore`.
    """
    data: Any = values.get(DATA_NAME)
    is_watched = on_mismatch != "error" and hasattr(data, "get_state") and hasattr(data, "set_state")
    before = data.get_state() if is_watched else None  # in a job it may be set in those processes that do not refuse
    try:
        return manager.restore(values, progress=progress)
    except IteratorStateError as error:
        if on_mismatch == "error" or DATA_NAME not in values:
            raise
        _log.warning("the data does not go on where it was, by request (%s): %s", on_mismatch, error)
    if is_watched:
        manager.all_do("setting the data back", lambda: _set_back(data, before))
    rest = manager.restore({name: value for name, value in values.items() if name != DATA_NAME}, progress=progress)
    if on_mismatch == "skip":
        count = manager.restored_step or 0
        manager.all_do(f"skipping {count} elements of the data", lambda: _skip(data, count))
    return {name: rest.get(name, value) for name, value in values.items()}


def _set_back(data: Any, before: Any) -> None:
    """One that has refused the saved position is where it was."""
    try:
        is_there = bool(data.get_state() == before)
    except ValueError:  # arrays in it
        is_there = False
    if not is_there:
        data.set_state(before)


def _skip(data: Any, count: int) -> None:
    for number in range(count):
        try:
            next(data)
        except StopIteration:
            raise IteratorStateError(
                f"data: expected {count} elements to skip, one for each completed update, found {number}; give an "
                'iterator that repeats, or data_on_mismatch="restart"'
            ) from None


def refuse_to_continue(directory: str, latest: int | None) -> None:
    """Raise SettingsError if a run has steps that a loop did not resume from: it would continue it from scratch."""
    if latest is not None:
        raise SettingsError(
            f"{directory}: has step {latest}, but the loop did not resume; call ckpt.resume(state, data) before it, "
            "or choose another directory"
        )


class LoopState:
    """The updates of one loop.

    Args:
        warns: whether a loop is told when it leaves an update out.
        takes_positions: whether the positions of all iterators are taken in each update, so that the update can be
            saved while the next one is under way. Else those of Grain's are, as far as that takes 1 % of the time.
        fingerprint: of the data, for these positions.

    Attributes:
        completed: how many are complete; in `updates`, the one under way included.
        called: whether the loop has told of the update under way.
        in_steps: whether the loop runs over `updates`.
        broken: whether the body of that loop is running, or was left by a break.
        num_steps: how many updates the whole training has; None: the loop does not say.
        last: checkpointables of the last completed update by name; None until the loop has told of one.
        step: its label.
        metrics: its metrics.
        handed_over: the names for which the loop has given another object than the one before.
    """

    def __init__(self, warns: bool = True, takes_positions: bool = False, fingerprint: str | None = None) -> None:
        self._takes_positions, self._fingerprint = takes_positions, fingerprint
        self._taken: Mapping[str, Taken] = {}
        self._taking_s, self._began_at = -0.5, time.monotonic()  # the first ones import what they need
        self._warns = self._warns_of_steps_back = warns
        self.completed = 0
        self.called = self.in_steps = self.broken = False
        self.num_steps: int | None = None
        self.last: Mapping[str, Any] | None = None
        self.step = 0
        self.metrics: Mapping[str, Any] | None = None
        self._current: dict[str, Any] = {}
        self.handed_over: set[str] = set()
        self._needed: frozenset[str] = frozenset()
        # Of the iterators whose positions are taken, whether what they give may change with the next element.
        self._iterators: dict[str, bool] = {}
        self._moves: bool | None = None  # whether one of Grain's moved in each update; None: not known yet

    def begin(self, values: Mapping[str, Any], completed: int = 0) -> None:
        """Take note of what the loop works with from now on. Values that go stale are not held.

        Raises:
            SettingsError: a name that `ckpt(...)` uses for something else.
        """
        for name in _RESERVED:
            if name in values:
                raise SettingsError(f"resume: {name!r} cannot name a checkpointable; choose another name")
        self._needed = frozenset(name for name, value in values.items() if not keeps_itself_current(value))
        self._current = {name: value for name, value in values.items() if name not in self._needed}
        self._find_iterators()
        self._taken, self._moves = {}, None
        self.last, self.metrics, self.step = None, None, 0
        self.completed, self.called, self.broken = completed, False, False

    def updates(self, num_steps: int, must_stop: Callable[[], bool]) -> Iterator[int]:
        """The numbers of the updates still to do; asks before each whether to stop."""
        self.num_steps = whole(0)("steps: num_steps", num_steps)
        if self._is_under_way() and self.complete < num_steps:  # an error or interrupt ended it: its number comes again
            self.completed, self.broken = self.complete, False
        if self.completed > num_steps:
            _log.warning(
                "steps(%d): the run has completed %d updates already, so there is nothing to do; give the number of "
                "updates of the whole training, not of this start",
                num_steps,
                self.completed,
            )
        self.in_steps = True
        try:
            while self.completed < num_steps and not must_stop():
                self.called, self.broken = False, True
                self.completed += 1
                yield self.completed - 1
                self.broken = False
                self._warn_unless_called()
        finally:
            self.in_steps = False

    def _warn_unless_called(self) -> None:
        """Once: a loop that tells of some updates only may never tell of one that is due, and nobody would know."""
        if self._warns and not self.called:
            self._warns = False
            _log.warning(
                "update %d ended and ckpt(...) was not called: call ckpt(state) in every update, it decides by itself "
                "which to save; what it is not told of is never saved",
                self.completed,
            )

    def count(self, step: int | None) -> None:
        """An update is complete: in `updates`, or after a break there, the one under way; else the next, or as named.

        Raises:
            SettingsError: within `updates`, a step that is not the one under way.
        """
        if not self.in_steps:
            if step is not None and check_step(step) < self.complete:
                self._warn_of_a_step_back(step)
            following = self.completed + (0 if self._is_under_way() else 1)
            self.completed = following if step is None else check_step(step)
        elif step is not None and check_step(step) != self.completed:
            raise SettingsError(
                f"ckpt(..., step={step}): expected {self.completed}, the number of completed updates; within "
                "ckpt.steps() leave `step` out"
            )
        self.called = True

    def _warn_of_a_step_back(self, step: int) -> None:
        """Once, and now: it may be long until a save is due, which will be refused."""
        if self._warns_of_steps_back:
            self._warns_of_steps_back = False
            _log.warning(
                "ckpt(...) is told of update %d after update %d: number updates over the whole training, from "
                "ckpt.completed_steps on after a resume; a step below the last that is saved cannot be saved",
                step,
                self.completed,
            )

    def has_begun_another(self) -> bool:
        """Whether an update was begun that the loop has not told of: the data is at a later position."""
        return self.step != self.completed or self._is_under_way()

    @property
    def complete(self) -> int:
        """How many updates are complete; the one under way is not."""
        return self.completed - self._is_under_way()

    def _is_under_way(self) -> bool:
        """Whether the body of `updates` is at work on an update, or was left by a break, and has not told of it."""
        return self.broken and not self.called

    def tell_that_it_went_on(self, saved: int | None) -> None:
        """Why the last completed update is not saved at the end."""
        _log.warning(
            "step %d is not saved at the end: since ckpt(...) was told of it, the loop has begun another update, "
            "so the position in the data is a later one; the last saved step is %s",
            self.step,
            saved,
        )

    def finished(self) -> bool:
        """Whether the loop has come to its end."""
        return self.num_steps is not None and self.completed >= self.num_steps and not self.broken

    def told(self, given: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> None:
        """Take note of what belongs to the update just completed.

        Raises:
            SettingsError: something that went stale since `resume` was not given anew: an old state would be saved.
        """
        missing = self._needed - given.keys()
        if missing:
            names = ", ".join(sorted(missing))
            raise SettingsError(
                f"ckpt(...) at step {self.completed}: expected {names}: what resume() got does not change in place, "
                "so its first value would be saved again and again; call ckpt(state), further ones by keyword"
            )
        for name in self._current.keys() & given.keys():  # such as an iterator of the next epoch
            if given[name] is not self._current[name]:
                self._hand_over(name, given[name])
        self.last = {**self._current, **given}
        if self._iterators:
            before, self._taken = self._taken, self._positions()
            self._note_movement(before)
        else:
            self._taken = {}
        self.step, self.metrics = self.completed, metrics

    def _hand_over(self, name: str, value: Any) -> None:
        """What later calls save under this name, if they do not give it: the new value, as far as it stays current."""
        self.handed_over.add(name)
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

    def _positions(self) -> Mapping[str, Taken]:
        """Those of the iterators now."""
        if not self._takes_positions and self._taking_s > TAKING_SHARE * (time.monotonic() - self._began_at):
            return {}
        began = time.thread_time()
        found = dict[str, Taken]()
        for name, may_change in self._iterators.items():
            taken = self._take(name)
            if taken.staged.write_files is None:
                staged = copy.deepcopy(taken.staged) if may_change else taken.staged
                found[name] = dataclasses.replace(taken, staged=staged)
        self._taking_s += time.thread_time() - began
        return found

    def _note_movement(self, before: Mapping[str, Taken]) -> None:
        both = [name for name in self._grain_iterators() if name in before and name in self._taken]
        if both:
            self._moves = self._moves is not False and any(before[name] != self._taken[name] for name in both)

    def _grain_iterators(self) -> list[str]:
        return [name for name, may_change in self._iterators.items() if not may_change]

    def _take(self, name: str) -> Taken:
        with with_fingerprint(self._fingerprint):
            return take(self._current[name])

    def unchanged(self) -> Mapping[str, Any] | None:
        """The checkpointables as of the last completed update; None: the next one may have changed some of them."""
        if self.last is None or (self.num_steps is not None and not self.has_begun_another()):
            return self.last
        if self._current.keys() - self._taken.keys() and not self._is_data_where_it_was():
            return None
        given = {name: value for name, value in self.last.items() if name not in self._taken}
        if any(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in jax.tree.leaves(given)):
            return None
        return {**self.last, **self._taken}

    def _is_data_where_it_was(self) -> bool:
        """Whether Grain's iterators gave nothing since: then the next update has not begun, and nothing has changed.

        Known of loops only in which each update so far has taken something: others make several updates of one batch.
        """
        of_grain = [name for name in self._grain_iterators() if name in self._taken]
        return bool(self._moves and of_grain) and all(self._take(name) == self._taken[name] for name in of_grain)

    def data_ended(self) -> IteratorStateError:
        """The error in place of a StopIteration that ends the loop."""
        planned = "" if self.num_steps is None else f" of {self.num_steps}"
        return IteratorStateError(
            f"the data ended at step {self.complete}{planned}: after that many completed updates the loop raised "
            "StopIteration, as next(...) does for an iterator without further elements. Let the data repeat, as by "
            "iter(dataset.repeat()), or catch StopIteration where the loop may end with its data"
        )


class LoopObserver(Protocol):
    """What is called on the loop's thread, within the calls of its callback; what it raises, those raise."""

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """The loop goes on with `values`, restored from `manager.restored_step` (None: it begins anew).

        Returns:
            What the loop is given in their place; its callback keeps `values`.
        """

    def told(self, manager: StepManager, loop: LoopState) -> None:
        """The loop has told of the update `loop.step`; nothing of it is saved yet."""

    def polled(self) -> None:
        """The loop calls `ckpt.poll()`, as an evaluation does."""


def observe(observer: LoopObserver | None) -> None:
    """Have the loops of this process watched from now on; None: by nobody."""
    global _observer
    _observer = observer


def resumed(manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
    """See LoopObserver.resumed."""
    return values if _observer is None else _observer.resumed(manager, values)


def told(manager: StepManager, loop: LoopState) -> None:
    """See LoopObserver.told."""
    if _observer is not None:
        _observer.told(manager, loop)


def polled() -> None:
    """See LoopObserver.polled."""
    if _observer is not None:
        _observer.polled()


class LoopHook:
    """Called after each update, with the number that the loop has for it.

    Args:
        callback: the CheckpointCallback.
        get_state: returns the state to save.
        get_metrics: returns the metrics of the update; None: there are none.
        first_step: the number with which the loop calls its hooks after the very first update: 1, or 0 where it counts
            from 0.

    Raises:
        SettingsError: `first_step` is neither 0 nor 1, or no function was given.
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
        """Tell that an update is complete.

        Args:
            step: its number, as the loop counts.
            t: the time, which other hooks use and this one does not.

        Returns:
            Whether the step is being saved.

        Raises:
            SettingsError: the number is none, or below that of the first update.
        """
        number = index_of(step)
        if number is None:
            refuse("hook(step)", "the number of the update, a whole number", step)
        completed = number + 1 - self._first_step
        if completed < 1:
            raise SettingsError(
                f"hook({number}): expected {self._first_step} after the first update, or more after a later one: each "
                "step would be saved under the label of the one before; for a loop that counts from 0 make the hook by "
                "as_hook(get_state, first_step=0)"
            )
        metrics = None if self._get_metrics is None else self._get_metrics()
        return bool(self._callback(self._get_state(), metrics=metrics, step=completed).saved)


def _check_function(subject: str, does: str, found: object) -> None:
    if not callable(found):  # a whole state is no good text
        kind = type(found).__name__
        raise SettingsError(f"{subject}: expected a function without arguments that {does}, found one {kind}")


class LoopForms(abc.ABC):
    """What `CheckpointCallback` offers beside its own call; each does the same as that.

    Attributes:
        enabled: whether anything is saved.
        manager: of the run.
    """

    enabled: bool
    manager: StepManager
    _shutdown: GracefulShutdown
    _best_metric: str | None
    _best_mode: Literal["min", "max"] | None

    @abc.abstractmethod
    def __call__(self, state: Any, *, metrics: Mapping[str, Any] | None = None, step: int | None = None) -> SaveResult:
        """Tell that an update is complete."""

    @abc.abstractmethod
    def save_now(self) -> SaveResult:
        """Save the last completed update."""

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

    def all_steps(self) -> list[int]:
        """The committed steps, lowest first."""
        return self.manager.steps if self.enabled else []

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """The committed step with the best value of a metric; None: no step has it.

        Args:
            metric: its name; None: `best_metric` of this callback.
            mode: "min": lower is better; "max": higher is; None: `best_mode` of this callback, if that is for the same
                metric; else "min", and refused for a metric such as "accuracy".

        Raises:
            SettingsError: there is no metric to compare, or its mode has to be stated.
        """
        name = metric or self._best_metric
        if name is None:
            raise SettingsError("best_step: expected a metric, or best_metric of the callback; found neither")
        own = self._best_mode if self._best_metric in (None, name) else None
        return self.manager.best(name, mode or own) if self.enabled else None

    def load(self, step: int | None = None, like: Any = None) -> Any:
        """The state of a committed step. Only reads: the loop and the run go on as if nothing was loaded.

        A save under way is not waited for; its step is not there yet.

        Args:
            step: which; None: the newest one that is whole.
            like: the target, as of `jaxckpt_train.load`; NNX objects in it are set in place, so give others than those
                that the loop trains. None: nested dicts and lists of numpy arrays.

        Raises:
            StepNotFoundError: there is no such step.
            CorruptCheckpointError: its bytes are not what was saved.
            MismatchError: it does not fit `like`; no array was read.
        """
        return self.manager.load({"state": like}, step)["state"]

    def wait_until_finished(self) -> None:
        """Wait until the save under way is committed.

        Raises:
            SystemExit, Preempted: asked to leave meanwhile, and it was not committed within the grace period.
            Exception: the original error of the save, if it failed.
        """
        self._shutdown.wait(self.manager)

    wait = wait_until_finished

    def as_hook(self, get_state: Any, *, get_metrics: Any = None, first_step: int = 1) -> LoopHook:
        """A hook for loops that call `hook(step, t=None)` after each update, as clu's periodic actions are called.

        Args:
            get_state: a function without arguments that returns the state to save.
            get_metrics: one that returns its metrics; None: there are none.
            first_step: with which `step` the hook is called after the very first update: 1, as in clu's documentation,
                or 0, as in Flax's examples, which call `hook(step)` within `for step in range(...)`.

        Raises:
            SettingsError: `first_step` is neither 0 nor 1, or no function was given.
        """
        return LoopHook(self, get_state, get_metrics, first_step)

    def on_step(self, info: Any, force: bool = False) -> None:
        """A hook in Levanter's form: `trainer.add_hook(ckpt.on_step, every=1)`.

        Args:
            info: has the `state` after the update number `step`, which is counted from 0. Of a state that says itself
                what of it is to be saved, by a `saveable_state`, that is saved.
            force: save it whatever the policy says.

        Raises:
            SettingsError: `info` has no state, or no number of the update.
        """
        for name in ("state", "step"):
            if not hasattr(info, name):
                found = f"one {type(info).__name__} without `{name}`"
                raise SettingsError(f"on_step: info: expected an object with `state` and `step`, found {found}")
        step = whole(-1)("on_step: info.step", info.step)
        self.save(step + 1, getattr(info.state, "saveable_state", info.state), force=force)
