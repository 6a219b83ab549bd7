"""The callback in the forms that other loops know: of managers, of clu's hooks, and of Levanter's."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Literal

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.departure import Departure
from jaxckpt_train.steps.hooks import LoopHook
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.step_save import SaveResult
from jaxckpt_train.value_checks import whole


class LoopForms(abc.ABC):
    """What `CheckpointCallback` offers beside its own call; each does the same as that.

    Attributes:
        enabled: whether anything is saved.
        manager: of the run.
    """

    enabled: bool
    manager: StepManager
    _departure: Departure
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
        self._departure.wait(self.manager)

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
