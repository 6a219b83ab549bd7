"""A manager in Orbax's form: a program that uses Orbax's `CheckpointManager` moves over by changing its import.

    from jaxckpt_train.integrations import orbax_manager as ocp     # was: import orbax.checkpoint as ocp

Orbax need not be installed; its own `args` and options are taken as well, also where Orbax makes them.

Which steps there are for a program written for Orbax: a step counts from when its save has begun.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from jaxckpt_train.checkpoint import load_checkpointables
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.distributed.jax_service import current, preemption_service
from jaxckpt_train.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    MismatchError,
    SettingsError,
    StepNotFoundError,
    suppress_secondary,
)
from jaxckpt_train.integrations import orbax_args as args
from jaxckpt_train.integrations.orbax_args import (
    ArrayRestoreArgs,
    BestByFunction,
    ButDeleted,
    CallStatistics,
    CheckpointManagerOptions,
    EndOfSave,
    RestoreArgs,
    SaveArgs,
    best_policy,
    checked_logger,
    may_drop_newest,
    preservation_policy,
    read_options,
    save_policy,
)
from jaxckpt_train.integrations.orbax_items import (
    HandledItem,
    Items,
    RootMetadata,
    StepMetadata,
    TreeMetadata,
    UnknownItemError,
    read_root_metadata,
    write_root_metadata,
)
from jaxckpt_train.integrations.orbax_trees import as_saved
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pending import PendingSave, SaveFuture
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    DecisionContext,
    PreservationPolicy,
    ask_to_preserve,
    steps_to_delete,
)
from jaxckpt_train.preemption.watch import PreemptionWatch
from jaxckpt_train.pytree.flatten import PLACEHOLDER
from jaxckpt_train.run.catalog import refuse_flax_checkpoints, refuse_other_steps, shown_name
from jaxckpt_train.run.entry import check_step
from jaxckpt_train.run.history import Clock, utc_now
from jaxckpt_train.run.saving import SaveResult
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.timeouts import call_with_timeout

T = TypeVar("T")
_SAVING: weakref.WeakValueDictionary[str, CheckpointManager] = weakref.WeakValueDictionary()
_log = logging.getLogger("jaxckpt_train")
PathLike = str | os.PathLike[str]


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


__all__ = [
    "PLACEHOLDER",
    "ArrayRestoreArgs",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "MissingStepError",
    "RestoreArgs",
    "RootMetadata",
    "SaveArgs",
    "StepAlreadyExistsError",
    "StepMetadata",
    "TargetMismatchError",
    "TreeMetadata",
    "UnknownItemError",
    "args",
]


class CheckpointManager:
    """The steps of one run, with the calls of Orbax's `CheckpointManager`.

    Steps have the numbers that they are given. A step is listed from the start of its save, as in Orbax, unless that
    fails.

    Args:
        directory: of the run.
        checkpointers: Orbax's checkpointers, one or several by name, for programs that give `items` to `save`; or None.
        options: own ones, or Orbax's.
        metadata: plain JSON data to keep with the run; where the run has such already, that stays.
        item_names: names of the checkpointables, and no others; None: args say them.
        item_handlers: Orbax's handlers, one or several by name, whose args are taken, and no others; or None.
        logger: an object with `log_entry`, which is given a dict about each save and restore; None: such is logged to
            jaxckpt_train.
        handler_registry: Orbax's registry of handlers, by which items take the args of their handlers; or None.
        settings: how checkpoints are stored; None: the defaults.
        clock: the time, with a time zone, for tests; None: the wall clock.

    Raises:
        SettingsError: an argument cannot be honoured.
    """

    def __init__(
        self,
        directory: PathLike,
        checkpointers: Any = None,
        options: Any = None,
        metadata: Any = None,
        item_names: Any = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        settings: StoreSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._logger = checked_logger(logger)
        self._last_began: float | None = None  # of the last save
        self._items = Items(item_names, item_handlers, handler_registry, checkpointers)
        self._options = read_options(options)
        self._kept, self._best = ButDeleted(preservation_policy(self._options)), best_policy(self._options)
        self._directory, self._settings, self._clock = os.fspath(directory), settings, clock or utc_now
        self._manager, self._steps = self._opened()
        if self._manager.latest is None:
            refuse_other_steps(LocalBackend(), self._manager.directory)
            refuse_flax_checkpoints(LocalBackend(), self._manager.directory)
        self._watch: PreemptionWatch | None = None
        self._said: tuple[int, bool] | None = None  # whether to leave at a step, as was found out for it
        self._is_told = False  # by reached_preemption
        if self._options.create and not self._options.read_only:
            make = functools.partial(LocalBackend().make_directory, self._manager.directory, parents=True, sync=True)
            call_with_timeout(self._manager.directory, lambda _: make())
        self._metadata = None if metadata is None else dict(metadata)
        if metadata is not None and self._options.save_root_metadata and not self._options.read_only:
            self._manager.on_all("keeping the metadata of the run", self._keep_metadata)

    def _opened(self) -> tuple[StepManager, ListedSteps]:
        """The run, as a manager that does not own it yet, and its steps."""
        folder = self._options.todelete_subdir
        manager = StepManager(
            self._directory,
            save_decision_policy=save_policy(self._options),
            preservation_policy=self._kept,
            settings=self._settings,
            clock=self._clock,
            backend=None if folder is None else MovesDeleted(folder),
        )
        return manager, ListedSteps(manager, self._kept, self._best, self._clock)

    def _keep_metadata(self) -> None:
        directory, metadata = self._manager.directory, self._metadata
        if metadata is not None and current().process == 0:
            call_with_timeout(directory, lambda _: write_root_metadata(directory, metadata))

    @property
    def directory(self) -> Path:
        """Of the run."""
        return Path(self._manager.directory)

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step: it is above all that there are, and the options ask for it."""
        step = check_step(step)
        if self._is_read_only("saved"):
            return False
        self._look_whether_to_leave(step)
        return self._steps.is_above(step) and self._manager.should_save(step)

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save a step if the options ask for it. Returns once the state is taken.

        Args:
            step: its number, above those that there are.
            items: what to save where `args` is None: the deprecated form of a manager whose handlers are given.
            save_kwargs: more arguments of its args, in the same form.
            metrics: numbers by name.
            force: save it whatever the options say.
            args: what to save: args of `orbax_args`, of Orbax or of Grain, one, or a Composite of several by name.
            custom_metadata: plain JSON data to keep with the step.

        Returns:
            Whether it is being saved.

        Raises:
            StepAlreadyExistsError: with `force`: it is there.
            SettingsError: args cannot be honoured; or with `force`: it is below one that is there.
            Exception: the original error of the save before, if that failed.
        """
        step, values = check_step(step), self._items.to_save(args, items, save_kwargs)
        statistics = CallStatistics("save", step, self._manager.directory)
        if self._is_read_only("saved"):
            return False
        self._look_whether_to_leave(step)
        if not (force or self._steps.is_above(step)):
            return False
        metrics = None if self._options.prevent_write_metrics else metrics
        looked, previous = time.time(), EndOfSave(self._steps.pending)
        is_listed = self._is_listed(step, metrics, bool(force))
        statistics.part("get_old_steps", looked)
        began = time.time()
        more: dict[str, Any] = {"metrics": metrics, "custom_metadata": custom_metadata, "force": bool(force)}
        result = self._begin(step, values, more | {"temporary": not is_listed})
        if result.pending is None:
            return False
        if self._best is not None and metrics is None:
            _log.warning("step %d: best_fn is given, and no metrics: it is never the best", step)
        self._steps.begun(step, metrics, result.pending, is_listed=is_listed)
        self._kept.deleted.discard(step)
        # Its error is raised later: asking it has not seen that.
        outcome, finalized = cast("SaveFuture[Any]", result.pending.committed), self._options.finalized
        if finalized is not None:
            outcome.add_done_callback(lambda done: outcome.error() is None and finalized())
        for value in values.values():
            if isinstance(value, HandledItem):
                outcome.add_done_callback(value.give_up)
                value.taken.wait()
        is_async = self._options.enable_async_checkpointing if self._items.is_async is None else self._items.is_async
        if not is_async:
            self.wait_until_finished()
        self._log_save(statistics, began, previous, is_async=is_async)
        return True

    def _log_save(self, statistics: CallStatistics, began: float, previous: EndOfSave, *, is_async: bool) -> None:
        """Log what a save took; `began`: when it could begin but for the one before."""
        reached = self._said is not None and self._said[1]
        statistics.entry |= {
            "reached_preemption": reached,
            "preemption_received_at": time.time() if reached else None,
            "synchronous": not is_async,
            "time_between_consecutive_saves_sec": None if self._last_began is None else began - self._last_began,
        }
        self._last_began = began
        statistics.part("wait_for_prev", began, previous.time)
        statistics.part("checkpointer_blocking", max(began, previous.time or began))
        statistics.ended("checkpoint_manager_blocking", self._logger)

    def _begin(self, step: int, values: Mapping[str, Any], more: Mapping[str, Any]) -> SaveResult:
        """Have the run save a step, also where another manager of this process, or an unlisted step, is in the way."""
        other = _SAVING.get(self._manager.directory)
        if other is not None and other is not self and (more["force"] or self._manager.should_save(step)):
            other._let_go()  # it can go on: it takes the directory back with its next save
        try:
            result = self._steps.checked(lambda: self._manager.save(step, values, **more))
        except (StepAlreadyExistsError, SettingsError):
            if not self._steps.is_unlisted(step):
                raise
            result = self._steps.checked(lambda: self._manager.save(step, values, **more, overwrite=True))
        if result.pending is not None:
            _SAVING[self._manager.directory] = self
        return result

    def _let_go(self) -> None:
        """Wait for the save under way, and leave the directory to another manager of this process."""
        self._manager.close()
        self._manager, self._steps = self._opened()

    def _is_listed(self, step: int, metrics: Mapping[str, Any] | None, force: bool) -> bool:
        """Whether a step that is saved now is one that the options keep."""
        if not may_drop_newest(self._options) or not (force or self._manager.should_save(step)):
            return True
        return self._steps.keeps(step, metrics)

    def _is_read_only(self, done: str) -> bool:
        if self._options.read_only:
            _log.warning("%s is read only: nothing is %s", self.directory, done)
        return self._options.read_only

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: PathLike | None = None,
        args: Any = None,
    ) -> Any:
        """Restore a step.

        Until this manager has saved, the run goes on from what was restored last: from an older step, later ones are
        left behind. After that, restoring an older step only looks at it.

        Args:
            step: which; None: the newest one that is whole.
            items: the targets where `args` is None: the deprecated form of a manager whose handlers are given.
            restore_kwargs: more arguments of their args, in the same form.
            directory: of another run; None: of this one.
            args: what to restore, and into which targets; None: all, as it was saved.

        Returns:
            What was restored; of several a Composite.

        Raises:
            MissingStepError: there is no such step.
            UnknownItemError: it has no such item.
            TargetMismatchError: a target does not fit.
            CorruptCheckpointError: the step is damaged.
        """
        source = self._manager if directory is None else StepManager(directory, settings=self._manager.settings)
        statistics = CallStatistics("restore", step, source.directory)
        self.wait_until_finished()
        if step is None and directory is None and self._steps.is_unlisted(0):
            step = self._steps.latest()
            if step is None:
                raise MissingStepError(f"{self.directory}: has no steps that the options keep")
        saved = self._saved(source, step)
        targets = self._items.targets(args, None if saved is None else saved.checkpointables, items, restore_kwargs)
        like = {name: target.like for name, target in targets.items()}
        began = time.time()
        try:
            found = self._load(source, step, like or None)
        except MismatchError as error:
            raise TargetMismatchError(str(error), error.differences) from error
        statistics.part("checkpointer", began)
        done = {name: targets[name].finished(value) if name in targets else value for name, value in found.items()}
        if step is None:
            statistics.entry["step"] = source.restored_step
        statistics.ended("checkpoint_manager", self._logger)
        return self._items.found(done)

    def _saved(self, source: StepManager, step: int | None) -> CheckpointMetadata | None:
        """What a step holds; None: it does not say, and another one is restored instead."""
        try:
            return source.metadata(step)
        except StepNotFoundError as error:
            raise MissingStepError(str(error)) from error
        except CorruptCheckpointError:
            if step is not None:
                raise
            return None

    def _load(self, source: StepManager, step: int | None, targets: Mapping[str, Any] | None) -> dict[str, Any]:
        is_own = source is self._manager
        if is_own and self._steps.has_saved and step not in (None, source.latest):
            return load_checkpointables(source.path(step), targets, settings=source.settings)
        restored = source.restore(targets, step=step)
        if is_own:
            self._steps.restored()
        return restored

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps, lowest first; one whose save is under way is there already, and what goes after it is not."""
        return self._steps.all()

    def latest_step(self) -> int | None:
        """The newest step; None: there is none."""
        return self._steps.latest()

    def best_step(self) -> int | None:
        """The step with the best metrics, by `best_fn`; without that the newest. None: there is none."""
        return self._steps.best()

    def metrics(self, step: int) -> dict[str, float] | None:
        """The metrics of a step; None: it has none."""
        return self._steps.metrics(step)

    def item_metadata(self, step: int) -> Any:
        """What a step holds: `TreeMetadata` of a tree, None of anything else; of several items a Composite of these.

        Raises:
            MissingStepError: there is no such step.
        """
        if step is None:
            raise SettingsError("item_metadata: expected a step, found None")
        return self.metadata(step).item_metadata

    @overload
    def metadata(self, step: None = None) -> RootMetadata: ...

    @overload
    def metadata(self, step: int) -> StepMetadata: ...

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """What a step holds, its metrics, and what was given with it; None: what was given with the run.

        Raises:
            MissingStepError: there is no such step.
        """
        directory = self._manager.directory
        if step is None:
            found = call_with_timeout(directory, lambda _: read_root_metadata(directory))
            if found is None and self._options.read_only:
                found = self._metadata
            return RootMetadata(found or {})
        self.wait_until_finished()
        saved = self._saved(self._manager, step)
        assert saved is not None
        parts = saved.checkpointables
        trees = {name: None if each.tree is None else TreeMetadata(as_saved(each)) for name, each in parts.items()}
        custom = {} if saved.custom_metadata is None else saved.custom_metadata
        return StepMetadata(self._items.found(trees), saved.metrics, custom)

    def delete(self, step: int) -> None:
        """Delete a step; the newest one cannot be.

        Raises:
            MissingStepError: there is no such step.
            SettingsError: it is the newest, or pinned.
        """
        if self._is_read_only("deleted"):
            return
        self.wait_until_finished()
        listed = self._steps.all()
        if step not in listed:
            raise MissingStepError(f"{self.directory}: expected one of {listed} to delete, found {step}")
        self._kept.deleted.add(step)
        self._manager.retain()
        if step in self._manager.steps:
            self._kept.deleted.discard(step)
            raise SettingsError(f"{self.directory}: step {step} is the newest, or is pinned: such a step always stays")

    def reached_preemption(self, step: int) -> bool:
        """Whether the process was asked to leave, by SIGTERM. The first call begins to watch for it.

        From then on SIGTERM does not end the process: end your loop when this says so. Call it in every update, in all
        processes of a job, before or after `save`: both give the same answer of a step, and the one that is left at is
        saved.
        """
        if self._said is None or self._said[0] != step or self._is_told:
            self._said = step, self._is_reached()
        self._is_told = True
        return self._said[1]

    def _look_whether_to_leave(self, step: int) -> None:
        """Once for each step, if that is watched for: by the first `reached_preemption`, or JAX's service of a job."""
        is_watched = self._watch is not None or preemption_service() is not None
        if is_watched and (self._said is None or self._said[0] != step):
            self._said, self._is_told = (step, self._is_reached()), False

    def _is_reached(self) -> bool:
        if self._watch is None:
            limit_s = self._manager.settings.barrier_timeout_s
            self._watch = PreemptionWatch(
                current(), service=preemption_service(), signals=("SIGTERM",), timeout_s=limit_s
            )
            self._watch.start()
        reached = self._watch.reached()
        if reached:
            self._manager.leaves()
        return reached

    def wait_until_finished(self) -> None:
        """Wait until the save under way is on the disk.

        Raises:
            Exception: the original error of the save, if it failed.
        """
        self._steps.wait()

    def is_saving_in_progress(self) -> bool:
        """Whether a save is under way."""
        return self._manager.is_saving_in_progress()

    def check_for_errors(self) -> None:
        """Raise the original error of a save that has failed, once."""
        self._steps.checked(self._manager.check)

    def reload(self) -> None:
        """Nothing: who only reads looks at the directory each time, and nobody else changes that of who saves."""

    def close(self) -> None:
        """Wait for what is under way, and let go of the directory.

        Raises:
            Exception: the original error of a save that failed.
        """
        try:
            self._manager.close()
        finally:
            if self._watch is not None:
                self._watch.stop()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress_secondary(error, self._manager.directory):
            self.close()
