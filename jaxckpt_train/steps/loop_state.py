"""Where a loop is: which updates are complete, and what it last told its callback of them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt_train.checkpointables.fingerprint import with_fingerprint
from jaxckpt_train.checkpointables.registry import is_grain_iterator, is_tree_in_place, keeps_itself_current
from jaxckpt_train.checkpointables.saving import Taken, take
from jaxckpt_train.errors import IteratorStateError, SettingsError
from jaxckpt_train.steps.step_names import check_step
from jaxckpt_train.value_checks import whole

_log = logging.getLogger("jaxckpt_train")
_RESERVED = ("metrics", "step")
TAKING_SHARE = 0.01
"""Of the loop's time: as much goes into taking positions that nobody has asked for."""


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
