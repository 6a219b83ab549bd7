"""Which steps there are for a program written for Orbax: a step counts from when its save has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxckpt_train.errors import CheckpointExistsError, MismatchError, SettingsError, StepNotFoundError
from jaxckpt_train.loops.orbax_policies import BestByFunction
from jaxckpt_train.pending import PendingSave
from jaxckpt_train.steps.interrupted import shown_name
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.policy_context import (
    CheckpointInfo,
    DecisionContext,
    PreservationPolicy,
    ask_to_preserve,
    steps_to_delete,
)
from jaxckpt_train.steps.step_save import Clock
from jaxckpt_train.store.local import LocalBackend

T = TypeVar("T")


class StepAlreadyExistsError(CheckpointExistsError, ValueError):
    """The step is saved already; what Orbax raises under this name is a ValueError, too."""


class MissingStepError(StepNotFoundError, FileNotFoundError):
    """There is no such step; Orbax raises FileNotFoundError."""


class TargetMismatchError(MismatchError, ValueError):
    """A target does not fit; Orbax raises ValueError."""


class MovesDeleted(LocalBackend):
    """The local file system, where a step that is deleted is moved into a subdirectory of its run instead.

    Args:
        folder: the name of the subdirectory.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def remove(self, path: str) -> None:
        """Move a deleted step, under the name that it had, or the next free one; remove anything else."""
        directory, _, hidden = path.rpartition("/")
        name = shown_name(hidden)
        if name == hidden:
            return super().remove(path)
        folder = f"{directory}/{self._folder}"
        self.make_directory(folder, parents=True, sync=True)
        taken = {entry.name for entry in self.list(folder)}
        names = (name if number == 0 else f"{name}.{number}" for number in range(len(taken) + 1))
        return self.rename(path, f"{folder}/{next(each for each in names if each not in taken)}")


class ListedSteps:
    """The steps that a program of Orbax sees: committed ones that the policy keeps, and one that is being saved.

    A newest step that the policy does not keep is saved as a temporary one: it is on the disk until the next commit,
    and not listed. In a job, all that decides whether its processes go on together is the same in all of them.

    Args:
        manager: of the run.
        kept: which steps are kept.
        best: which are better; None: nobody says.
        clock: the time, with a time zone.

    Attributes:
        has_saved: whether a save has begun here.
        pending: the last save that was started here; None: none, or its error was raised.
    """

    def __init__(
        self, manager: StepManager, kept: PreservationPolicy, best: BestByFunction | None, clock: Clock
    ) -> None:
        self._manager, self._kept, self._best, self._clock = manager, kept, best, clock
        self._newest: CheckpointInfo | None = None
        self._restored: int | None = None  # unless a save has begun since
        self.pending: PendingSave[Any] | None = None
        self._saver: threading.Thread | None = None
        self.has_saved = False

    def begun(
        self, step: int, metrics: Mapping[str, Any] | None, pending: PendingSave[Any], *, is_listed: bool
    ) -> None:
        """A save of it was started; `is_listed`: whether the policy keeps it."""
        self.pending, self._saver = pending, threading.current_thread()
        self._newest = CheckpointInfo(
            step, self._clock(), None if metrics is None else {**metrics}, temporary=not is_listed
        )
        self._restored, self.has_saved = None, True

    def restored(self) -> None:
        """The run goes on from what was restored, and not from what was saved here."""
        self._newest, self._restored = None, self._manager.restored_step

    def checked(self, call: Callable[[], T]) -> T:
        """The result of a call; where it raises the error of a save, that step is not listed any more.

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
            self._newest = self.pending = None
            raise

    def wait(self) -> None:
        """Wait for the save under way. Its error is raised in other threads, too, and stays for the one that saves."""
        if self.pending is not None and self._saver is not threading.current_thread():
            self.pending.wait()
        else:
            self.checked(self._manager.wait)

    def latest(self) -> int | None:
        """The newest step that is listed; None: there is none."""
        if self._newest is not None and not self._newest.temporary:
            return self._newest.step
        latest, listed = self._manager.latest, [info.step for info in self.infos()]
        return latest if latest in listed else max(listed, default=None)

    def is_unlisted(self, step: int) -> bool:
        """Whether this step, or a later one, is on the disk although the policy does not keep it."""
        return any(info.temporary and info.step >= step for info in self._every_info())

    def keeps(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Whether the policy would keep this step if it were saved now."""
        now = self._clock()
        infos = [*self.infos(), CheckpointInfo(step, now, None if metrics is None else {**metrics})]
        return ask_to_preserve(self._kept, infos, context=DecisionContext(now))[-1]

    def is_above(self, step: int) -> bool:
        """Whether a step is above all that there are; after a restore, above the one that was restored."""
        newest = self.latest() if self._restored is None else self._restored
        return newest is None or step > newest

    def all(self) -> list[int]:
        """The steps, lowest first; what goes once the save under way is committed is not among them."""
        infos, is_saving = self.infos(), self._newest is not None and self._manager.is_saving_in_progress()
        leaving = steps_to_delete(infos, self._kept, context=DecisionContext(self._clock())) if is_saving else set()
        return [info.step for info in infos if info.step not in leaving]

    def best(self) -> int | None:
        """The step with the best metrics, if somebody says which are better, else the newest; None: there is none."""
        if self._best is None:
            return self.latest()
        ranked = self._best.ranked(self.infos())
        return ranked[-1].step if ranked else None

    def metrics(self, step: int) -> dict[str, float] | None:
        """The metrics of a step; None: it has none."""
        found = next((info.metrics for info in self.infos() if info.step == step), None)
        return None if found is None else {name: float(value) for name, value in found.items()}

    def infos(self) -> list[CheckpointInfo]:
        """What is known of the steps that are listed, lowest first."""
        return [info for info in self._every_info() if not info.temporary]

    def _every_info(self) -> list[CheckpointInfo]:
        infos, newest = self._manager.infos, self._newest
        if newest is None or any(info.step == newest.step and info.temporary == newest.temporary for info in infos):
            return infos
        return sorted([*(info for info in infos if info.step != newest.step), newest], key=lambda info: info.step)
