"""Which steps there are for a program written for Orbax: a step counts from when its save has begun."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxckpt_train.errors import CheckpointExistsError, SettingsError, StepNotFoundError
from jaxckpt_train.loops.orbax_policies import BestByFunction
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.policy_context import CheckpointInfo, DecisionContext, PreservationPolicy, steps_to_delete

T = TypeVar("T")


class StepAlreadyExistsError(CheckpointExistsError, ValueError):
    """The step is saved already; what Orbax raises under this name is a ValueError, too."""


class MissingStepError(StepNotFoundError, FileNotFoundError):
    """There is no such step; Orbax raises FileNotFoundError."""


class BegunSteps:
    """The committed steps of a manager, and the one whose save has begun last, unless that is told to have failed.

    In a job, all that decides whether its processes go on together is the same in all of them.

    Args:
        manager: of the run.
        kept: which steps are kept.
        best: which are better; None: nobody says.

    Attributes:
        has_saved: whether a save has begun here.
    """

    def __init__(self, manager: StepManager, kept: PreservationPolicy, best: BestByFunction | None) -> None:
        self._manager, self._kept, self._best = manager, kept, best
        self._newest: CheckpointInfo | None = None
        self._restored: int | None = None  # unless a save has begun since
        self.has_saved = False

    def begun(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """A save of it has begun."""
        self._newest = CheckpointInfo(step, _now(), None if metrics is None else {**metrics})
        self._restored, self.has_saved = None, True

    def restored(self) -> None:
        """The run goes on from what was restored, and not from what was saved here."""
        self._newest, self._restored = None, self._manager.restored_step

    def told(self, call: Callable[[], T]) -> T:
        """What the call gives; a save that it tells to have failed does not count any more.

        Raises:
            StepAlreadyExistsError: the step that it saves is there.
        """
        try:
            return call()
        except CheckpointExistsError as error:
            raise StepAlreadyExistsError(str(error).partition(";")[0]) from error
        except SettingsError:  # of this call
            raise
        except BaseException:
            self._newest = None
            raise

    def latest(self) -> int | None:
        """The newest step; None: there is none."""
        return self._manager.latest if self._newest is None else self._newest.step

    def is_above(self, step: int) -> bool:
        """Whether a step is above all that there are; after a restore, above the one that was restored."""
        newest = self.latest() if self._restored is None else self._restored
        return newest is None or step > newest

    def all(self) -> list[int]:
        """The steps, lowest first; what goes once the save under way is committed is not among them."""
        infos, is_saving = self._infos(), self._newest is not None and self._manager.is_saving_in_progress()
        leaving = steps_to_delete(infos, self._kept, context=DecisionContext(_now())) if is_saving else set()
        return [info.step for info in infos if info.step not in leaving]

    def best(self) -> int | None:
        """The step with the best metrics, if somebody says which are better, else the newest; None: there is none."""
        if self._best is None:
            return self.latest()
        ranked = self._best.ranked(self._infos())
        return ranked[-1].step if ranked else None

    def metrics(self, step: int) -> dict[str, float] | None:
        """The metrics of a step; None: it has none."""
        found = next((info.metrics for info in self._infos() if info.step == step), None)
        return None if found is None else {name: float(value) for name, value in found.items()}

    def _infos(self) -> list[CheckpointInfo]:
        infos, newest = self._manager.infos, self._newest
        if newest is None or any(info.step == newest.step for info in infos):
            return infos
        return sorted([*infos, newest], key=lambda info: info.step)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
