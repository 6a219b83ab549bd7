"""What CheckpointCallback knows of its loop: which updates are complete, and how its values are made and restored."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from jaxckpt_train._validation import whole
from jaxckpt_train.checkpointables.handlers import (
    PytreeHandler,
    handler_of,
    is_grain_iterator,
    is_tree_in_place,
    keeps_itself_current,
)
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, with_fingerprint
from jaxckpt_train.checkpointables.staging import SaveTimes, StagedValue, stage_all, take
from jaxckpt_train.config import CallbackOptions
from jaxckpt_train.errors import IteratorStateError, SettingsError, UnsupportedLeafError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.context import PreservationPolicy, SavePolicy
from jaxckpt_train.policies.preservation import AnyPreservationPolicy, BestN, EveryNSteps, LatestN
from jaxckpt_train.policies.save import AnySavePolicy, EverySecondsPolicy, FixedIntervalPolicy, TemporarySavePolicy
from jaxckpt_train.pytree.copies import is_traced
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.target import is_format, with_layout
from jaxckpt_train.run.entry import check_step
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.reader import ReadProgress

DEFAULT_INTERVAL_SECS = 600.0
_log = logging.getLogger("jaxckpt_train")
_RESERVED = ("metrics", "step")
_NOTABLE_BYTES = 1 << 20  # of leaves whose sharding is unknown
MAX_POSITION_TIME_SHARE = 0.01
"""The share of the loop's time that may go into recording positions unless `save_on_error` asks for them."""
_observer: LoopObserver | None = None


class LoopState:
    """Which updates of a loop are complete, and the values of the last completed one.

    With `takes_positions`, the positions of all iterators are recorded at each update, so that the update can be saved
    while the next one runs. Otherwise only those of Grain iterators are, as long as this takes at most 1 % of the time.
    """

    def __init__(self, warns: bool = True, takes_positions: bool = False, fingerprint: str | None = None) -> None:
        self._takes_positions, self._fingerprint = takes_positions, fingerprint
        self._taken: Mapping[str, StagedValue] = {}
        # Half a second is free, since the first positions import modules.
        self._taking_s, self._began_at = -0.5, time.monotonic()
        self._warns = self._warns_of_steps_back = warns
        self.completed = 0  # updates; inside `updates`, this includes the running one
        self.called = False  # whether the loop has reported the running update
        self.in_steps = False  # whether the loop iterates over `updates`
        self.in_body = False  # whether the body of that loop is running, or was left by a `break`
        self.num_steps: int | None = None  # of the whole training, if the loop states it
        self.last: Mapping[str, Any] | None = None  # the checkpointables of the last completed update
        self.step = 0  # its label
        self.metrics: Mapping[str, Any] | None = None
        self._current: dict[str, Any] = {}
        self.replaced: set[str] = set()  # the names for which the loop has passed another object than before
        self._needed: frozenset[str] = frozenset()
        # The iterators whose positions are recorded. The value says whether the next element may change their state.
        self._iterators: dict[str, bool] = {}
        self._moves: bool | None = None  # whether a Grain iterator moved in each update; None: unknown so far

    def begin(self, values: Mapping[str, Any], completed: int = 0) -> None:
        """Start with new values. Values that do not change in place are not kept."""
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
        """
        if not self.in_steps:
            if step is not None and check_step(step) < self.complete and self._warns_of_steps_back:
                self._warns_of_steps_back = False  # warn at once: the next save, which is refused, may be much later
                _log.warning(
                    "ckpt(...) was called for update %d after update %d; number the updates over the whole training, "
                    "starting at ckpt.completed_steps after a resume; a step below the last saved one cannot be saved",
                    step,
                    self.completed,
                )
            following = self.completed + (0 if self._is_running() else 1)
            self.completed = following if step is None else check_step(step)
        elif step is not None and check_step(step) != self.completed:
            raise SettingsError(
                f"ckpt(..., step={step}): expected {self.completed}, the number of completed updates; omit `step` "
                "inside ckpt.steps()"
            )
        self.called = True

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
        """Record the values of the completed update; refuse if a value that does not change in place was not passed."""
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
        before, self._taken = self._taken, self._take_all() if self._iterators else {}
        both = [name for name in self._grain_iterators() if name in before and name in self._taken]
        if both:
            self._moves = self._moves is not False and any(before[name] != self._taken[name] for name in both)
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


class LoopObserver(Protocol):
    """Methods that the callback calls on the loop's thread. An error that they raise is raised from that call."""

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """The loop continues with `values`, restored from `manager.restored_step`; returns the values for the loop."""

    def update_completed(self, manager: StepManager, loop: LoopState) -> None:
        """The loop has reported the update `loop.step`, which is not saved yet."""

    def polled(self) -> None:
        """The loop has called `ckpt.poll()`, for example in an evaluation."""


def observe(observer: LoopObserver | None) -> None:
    """Set the observer of all loops of this process; None removes it."""
    global _observer
    _observer = observer


def current_observer() -> LoopObserver | None:
    """Return the observer of this process."""
    return _observer


def save_policy(options: CallbackOptions) -> SavePolicy:
    """Combine the reasons to save into one policy; without any, save every `DEFAULT_INTERVAL_SECS`."""
    reasons: list[SavePolicy] = []
    if options.save_interval_steps is not None:
        reasons.append(FixedIntervalPolicy(options.save_interval_steps))
    if options.save_interval_secs is not None:
        reasons.append(EverySecondsPolicy(options.save_interval_secs))
    if options.save_policy is not None:
        reasons.append(cast("SavePolicy", options.save_policy))
    if options.temporary_interval_secs is not None:
        reasons.append(TemporarySavePolicy(EverySecondsPolicy(options.temporary_interval_secs)))
    if not reasons:
        return EverySecondsPolicy(DEFAULT_INTERVAL_SECS)
    return reasons[0] if len(reasons) == 1 else AnySavePolicy(reasons)


def preservation_policy(options: CallbackOptions) -> PreservationPolicy | None:
    """Combine the reasons to keep steps into one policy; without any, None, which keeps every step."""
    reasons: list[PreservationPolicy] = []
    if options.keep_latest is not None:
        reasons.append(LatestN(options.keep_latest))
    if options.keep_every_steps is not None:
        reasons.append(EveryNSteps(options.keep_every_steps))
    if options.keep_best is not None and options.best_metric is not None:
        reasons.append(BestN(options.best_metric, options.keep_best, options.best_mode or "min"))
    if options.keep_policy is not None:
        reasons.append(cast("PreservationPolicy", options.keep_policy))
    if not reasons:
        return None
    return reasons[0] if len(reasons) == 1 else AnyPreservationPolicy(reasons)


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
    manager: StepManager, values: dict[str, Any], on_mismatch: str, progress: ReadProgress | None
) -> dict[str, Any]:
    """Restore the newest valid step into the values of a loop; `on_mismatch` is the option `data_on_mismatch`."""
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
    """Set the data back to its old position, unless it is still there: it may refuse any other state."""
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


def is_maker(value: object) -> bool:
    """Return whether a value is a function that makes a state, and not a module of NNX or Equinox, which is a state."""
    return callable(value) and isinstance(handler_of(value), PytreeHandler) and jax.tree_util.all_leaves([value])


def make_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Call each function that makes a value, and return the values."""
    return {name: value() if is_maker(value) else value for name, value in values.items()}


def trace_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `make_values` returns, with a `jax.ShapeDtypeStruct` and its known sharding for each array."""
    return {name: _abstract(value) if is_maker(value) else value for name, value in values.items()}


def refuse_abstract_values(values: Mapping[str, Any], directory: str) -> None:
    """Raise SettingsError if a loop without a step to restore passed an abstract state."""
    for name, value in values.items():
        tree_of = getattr(handler_of(value), "tree_of", None)
        if tree_of is None or not any(map(_is_abstract, jax.tree.leaves(tree := tree_of(value)))):
            continue
        flat = flatten(tree)
        leaf = next(path for path, leaf in zip(flat.names, flat.leaves, strict=True) if _is_abstract(leaf))
        raise SettingsError(
            f"resume: {name}: expected arrays, because {directory} has no step to restore, found a "
            f"jax.ShapeDtypeStruct at leaf {leaf!r}; pass the function that makes the state, resume(make_state, ...), "
            "which is called on a fresh start only"
        )


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _abstract(make: Callable[[], Any]) -> Any:
    try:
        return _traced(make)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        _log.warning(
            "resume: the function that makes the state cannot be traced, because it needs the values of some arrays. "
            "It is called instead, which computes all of its arrays. Compute the needed values outside of it. %s",
            str(error).partition("\n")[0],
        )
    state = make()
    return jax.tree.map(_form, state) if isinstance(handler_of(state), PytreeHandler) else state


def _traced(make: Callable[[], Any]) -> Any:
    seen: list[tuple[Any, Any, list[Any]]] = []

    def trace() -> list[jax.Array]:
        state = make()
        handler = handler_of(state)
        if not isinstance(handler, PytreeHandler):
            seen.append((handler, None, []))
            return []
        leaves, structure = jax.tree.flatten(state)
        forms = [None if is_traced(leaf) else _form(leaf) for leaf in leaves]
        seen.append((handler, structure, forms))
        return [leaf for leaf, form in zip(leaves, forms, strict=True) if form is None]

    traced, shapes = jax.make_jaxpr(trace, return_shape=True)()
    handler, structure, leaves = seen[-1]
    if structure is None:
        of_objects: Callable[[Callable[[], Any]], Any] | None = getattr(handler, "trace", None)
        return make() if of_objects is None else of_objects(make)
    found = zip(shapes, _shardings(traced.jaxpr), strict=True)
    arrays = iter([_struct(shape, shape.sharding if known is None else known) for shape, known in found])
    tree = jax.tree.unflatten(structure, [next(arrays) if leaf is None else leaf for leaf in leaves])
    _warn_of_unknown_shardings(tree)
    return tree


def _warn_of_unknown_shardings(tree: Any) -> None:
    """Warn if leaves go to the default device although other leaves of the state are on several devices."""
    structs = [leaf for leaf in jax.tree.leaves(tree) if _is_abstract(leaf)]
    unknown = [leaf for leaf in structs if leaf.sharding is None]
    are_spread = any(leaf.sharding is not None and leaf.sharding.num_devices > 1 for leaf in structs)
    if not are_spread or sum(map(_bytes, unknown)) < _NOTABLE_BYTES:
        return
    flat, largest = flatten(tree), max(unknown, key=_bytes)
    name = next(name for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is largest)
    _log.warning(
        "resume: leaf %r is restored to the default device (%d bytes in %d such leaves), while other leaves of the "
        "state are on several devices. Tracing the function that makes the state does not show the leaf's sharding; "
        "specify it by jax.jit(make_state, out_shardings=...)",
        name,
        sum(map(_bytes, unknown)),
        len(unknown),
    )


def _bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)


def _form(leaf: Any) -> Any:
    """Return a computed leaf, without its values if it is an array."""
    if type(leaf) is np.ndarray:
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    if not isinstance(leaf, jax.Array):
        return leaf
    return _struct(leaf, leaf.sharding if leaf.committed else None)


def _struct(like: Any, sharding: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(like.shape, like.dtype, sharding=sharding, weak_type=getattr(like, "weak_type", False))


def _shardings(jaxpr: Any) -> Sequence[Any]:
    """Return the shardings of the outputs, from `out_shardings`, a sharding constraint or a `jax.device_put`."""
    made_by = {id(var): (eqn.params, number) for eqn in jaxpr.eqns for number, var in enumerate(eqn.outvars)}

    def of(params: Mapping[str, Any], number: int) -> Any:
        given = [params[key][number] for key in ("out_shardings", "devices") if key in params]
        given.append(params.get("sharding"))
        found = next((each for each in given if isinstance(each, jax.sharding.Sharding) or is_format(each)), None)
        if found is None and "out_shardings" in params:
            return _shardings(params["jaxpr"].jaxpr)[number]
        return with_layout(found, params["out_layouts"][number]) if found and "out_layouts" in params else found

    return [of(*made_by.get(id(var), ({}, 0))) for var in jaxpr.outvars]
