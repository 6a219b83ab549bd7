"""A drop-in replacement for Orbax's `CheckpointManager`: a program migrates by changing its import.

    from jaxckpt_train.integrations import orbax_manager as ocp     # was: import orbax.checkpoint as ocp

Orbax need not be installed. Objects of Orbax's own `args` and options classes are accepted too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from jaxckpt_train._validation import is_url, refuse
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
    CheckpointManagerOptions,
    RestoreArgs,
    SaveArgs,
    best_policy,
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
    create_root,
    finished,
    orbax_path,
    read_root_metadata,
    write_root_metadata,
)
from jaxckpt_train.integrations.orbax_trees import TreeTarget, as_saved
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pending import PendingSave
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    DecisionContext,
    ask_to_preserve,
    steps_to_delete,
)
from jaxckpt_train.preemption.shutdown import GracefulShutdown
from jaxckpt_train.pytree.flatten import PLACEHOLDER
from jaxckpt_train.run.catalog import refuse_foreign
from jaxckpt_train.run.entry import check_step
from jaxckpt_train.run.history import Clock, utc_now
from jaxckpt_train.settings import StoreSettings, checked_settings
from jaxckpt_train.store.backends.by_path import backend_for
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import is_committed
from jaxckpt_train.store.removal import final_name

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

_SAVING: weakref.WeakValueDictionary[str, CheckpointManager] = weakref.WeakValueDictionary()
_log = logging.getLogger("jaxckpt_train")
PathLike = str | os.PathLike[str]


class StepAlreadyExistsError(CheckpointExistsError, ValueError):
    """The step already exists. It is also a ValueError, as Orbax's error of this name is."""


class MissingStepError(StepNotFoundError, FileNotFoundError):
    """The step does not exist. It is also a FileNotFoundError, which Orbax raises."""


class TargetMismatchError(MismatchError, ValueError):
    """A restore target does not match the checkpoint. It is also a ValueError, which Orbax raises."""


class CheckpointManager:
    """Saves and restores the steps of one run, with the methods of Orbax's `CheckpointManager`.

    Step numbers are stored as given. As in Orbax, a step is listed as soon as its save has started, unless the save
    fails.

    Args:
        directory: the directory of the run.
        checkpointers: an Orbax checkpointer, or one by item name, for programs that pass `items` to `save`.
        options: `CheckpointManagerOptions` of this package or of Orbax; None: the defaults.
        metadata: plain JSON data to keep with the run; metadata that the run already has is not replaced.
        item_names: the names of the checkpointables; no others are accepted. None: taken from `args`.
        item_handlers: an Orbax handler, or one by item name; only their args are accepted. None: any args.
        logger: must be None; the history of the run has the times of each save and restore.
        handler_registry: an Orbax handler registry, which decides the args that each item accepts; None: any args.
        settings: how checkpoints are stored; None: the defaults.
        clock: returns the current time, with a time zone, for tests; None: the wall clock.

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
        if logger is not None:
            refuse("CheckpointManager: logger", "None (the history of the run has the times of each save)", logger)
        self._items = Items(item_names, item_handlers, handler_registry, checkpointers)
        self._options = read_options(options)
        self._kept, self._best = ButDeleted(preservation_policy(self._options)), best_policy(self._options)
        self._directory, self._settings, self._clock = os.fspath(directory), settings, clock or utc_now
        self._backend = backend_for(checked_settings("settings", settings))
        self._manager, self._steps = self._opened()
        directory = self._manager.directory
        if self._manager.latest is None:
            refuse_foreign(self._backend, directory)
        self._shutdown: GracefulShutdown | None = None
        self._preemption_step: int | None = None  # the last step that was checked for a preemption
        self._reached = self._is_reported = False  # the result, and whether reached_preemption has returned it
        if self._options.create and not self._options.read_only:
            create_root(self._backend, directory)
        self._metadata = None if metadata is None else dict(metadata)
        if self._metadata is not None and self._options.save_root_metadata and not self._options.read_only:
            self._manager.on_all("writing the metadata of the run", self._write_metadata)

    def _opened(self) -> tuple[StepManager, _ListedSteps]:
        """Return a manager that does not own the run yet, and the steps of the run."""
        folder = self._options.todelete_subdir
        if folder is not None and is_url(self._directory):
            refuse("CheckpointManagerOptions: todelete_subdir", "None on an object store, which cannot rename", folder)
        manager = StepManager(
            self._directory,
            save_decision_policy=save_policy(self._options),
            preservation_policy=self._kept,
            settings=self._settings,
            clock=self._clock,
            backend=None if folder is None else _MoveDeletedBackend(folder),
        )
        return manager, _ListedSteps(manager, self._kept, self._best, self._clock)

    def _write_metadata(self) -> None:
        if current().process == 0:
            write_root_metadata(self._backend, self._manager.directory, self._metadata or {})

    @property
    def directory(self) -> Any:
        """The directory of the run as a Path, or its URL as an `epath.Path`, as in Orbax; that needs `etils`."""
        found = self._manager.directory
        return orbax_path(found) if is_url(found) else Path(found)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save this step: it is greater than every existing step and the options match."""
        step = check_step(step)
        if self._is_read_only("saved"):
            return False
        self._check_preemption(step)
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
        """Save a step if the options ask for it. Return once the snapshot of the state is taken.

        Args:
            step: the step number, greater than every existing step.
            items: what to save if `args` is None; the deprecated form for a manager that was given handlers.
            save_kwargs: further arguments of the save, in the same form.
            metrics: numbers by name.
            force: save the step even if the options do not ask for it.
            args: what to save: one of the args classes of `orbax_args`, Orbax or Grain, or a Composite of several.
            custom_metadata: plain JSON data to keep with the step.

        Returns:
            Whether the step is being saved.

        Raises:
            StepAlreadyExistsError: with `force`: the step already exists.
            SettingsError: `args` are not supported; or with `force`: the step is less than an existing one.
            Exception: the original error of the previous save, if that failed.
        """
        step, values, force = check_step(step), self._items.to_save(args, items, save_kwargs), bool(force)
        if self._is_read_only("saved"):
            return False
        self._check_preemption(step)
        if not (force or self._steps.is_above(step)):
            return False
        metrics = None if self._options.prevent_write_metrics else metrics
        is_listed = self._is_listed(step, metrics, force)
        self._take_over(step, force)
        overwrite = self._steps.is_unlisted(step)
        with self._steps.checked():
            pending = self._manager.save(
                step,
                values,
                metrics=metrics,
                custom_metadata=custom_metadata,
                overwrite=overwrite,
                force=force,
                temporary=not is_listed,
            ).pending
        if pending is None:
            return False
        _SAVING[self._manager.directory] = self
        if self._best is not None and metrics is None:
            _log.warning("step %d has no metrics, so best_fn can never select it as the best step", step)
        self._steps.mark_started(step, metrics, pending, is_listed=is_listed)
        self._kept.deleted.discard(step)
        self._follow(pending, values)
        is_async = self._options.enable_async_checkpointing if self._items.is_async is None else self._items.is_async
        if not is_async:
            self.wait_until_finished()
        return True

    def _follow(self, pending: PendingSave[Any], values: Mapping[str, Any]) -> None:
        """Call the options' function after the commit, and wait until custom handlers have copied their items."""
        finalized = getattr(self._options.async_options, "post_finalization_callback", None)
        # Ask the save itself, not the manager: the error of this save must still be raised by the next call.
        if finalized is not None:
            pending.committed.add_done_callback(lambda _: pending.error() is None and finalized())
        for value in values.values():
            if isinstance(value, HandledItem):
                pending.committed.add_done_callback(value.give_up)  # the save may fail before it calls the handler
                value.taken.wait()

    def _take_over(self, step: int, force: bool) -> None:
        """Let another manager of this process release the directory, if this step is to be saved."""
        other = _SAVING.get(self._manager.directory)
        if other is not None and other is not self and (force or self._manager.should_save(step)):
            other._manager.close()
            other._manager, other._steps = other._opened()  # it takes the directory back with its next save

    def _is_listed(self, step: int, metrics: Mapping[str, Any] | None, force: bool) -> bool:
        options = self._options
        may_drop = options.max_to_keep is not None and (options.best_fn is not None or options.max_to_keep == 0)
        if not (may_drop or options.preservation_policy) or not (force or self._manager.should_save(step)):
            return True
        return self._steps.keeps(step, metrics)

    def _is_read_only(self, action: str) -> bool:
        if self._options.read_only:
            _log.warning("%s is read-only: nothing is %s", self._manager.directory, action)
        return self._options.read_only

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: PathLike | None = None,
        args: Any = None,
    ) -> Any:
        """Restore a step. Before the first save of this manager, the run continues from there, without later steps.

        Args:
            step: the step; None: the newest valid step.
            items: the targets if `args` is None; the deprecated form for a manager that was given handlers.
            restore_kwargs: further arguments of the restore, in the same form.
            directory: the directory of another run; None: the directory of this manager.
            args: what to restore, and the targets; None: everything, as it was saved.

        Returns:
            The restored item, or a Composite of several items.

        Raises:
            MissingStepError: the step does not exist.
            UnknownItemError: the step has no item of this name.
            TargetMismatchError: a target does not match the checkpoint.
            CorruptCheckpointError: the step is damaged.
        """
        source = self._manager if directory is None else StepManager(directory, settings=self._manager.settings)
        self.wait_until_finished()
        if step is None and directory is None and self._steps.is_unlisted(0):
            step = self._steps.latest()
            if step is None:
                raise MissingStepError(f"{self._manager.directory}: expected a step that the options keep, found none")
        saved = self._saved(source, step)
        targets = self._items.targets(args, None if saved is None else saved.checkpointables, items, restore_kwargs)
        like = {name: each.like if isinstance(each, TreeTarget) else each for name, each in targets.items()}
        try:
            found = self._load(source, step, like or None)
        except MismatchError as error:
            raise TargetMismatchError(str(error), error.differences) from error
        done = {name: finished(targets.get(name), value) for name, value in found.items()}
        return self._items.found(done)

    def _saved(self, source: StepManager, step: int | None) -> CheckpointMetadata | None:
        """Return the metadata of a step; None: it is unreadable, and the restore falls back to an older step."""
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
            self._steps.mark_restored()
        return restored

    def all_steps(self, read: bool = False) -> list[int]:
        """Return the steps in ascending order, with that of the pending save, without those that it will delete."""
        return self._steps.all()

    def latest_step(self) -> int | None:
        """Return the newest step, or None if there is none."""
        return self._steps.latest()

    def best_step(self) -> int | None:
        """Return the step that `best_fn` ranks highest, or the newest step without `best_fn`, or None."""
        return self._steps.best()

    def metrics(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a step, or None if it has none."""
        found = next((info.metrics for info in self._steps.infos() if info.step == step), None)
        return None if found is None else {name: float(value) for name, value in found.items()}

    def item_metadata(self, step: int) -> Any:
        """Return the `item_metadata` of `metadata(step)`: a `TreeMetadata`, or None; a Composite of several items."""
        if step is None:
            raise SettingsError("item_metadata: expected a step, found None")
        return self.metadata(step).item_metadata

    @overload
    def metadata(self, step: None = None) -> RootMetadata: ...

    @overload
    def metadata(self, step: int) -> StepMetadata: ...

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Return the items, metrics and custom metadata of a step, or the metadata of the run if `step` is None.

        Raises:
            MissingStepError: the step does not exist.
        """
        if step is None:
            found = read_root_metadata(self._backend, self._manager.directory)
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
        """Delete a step.

        Raises:
            MissingStepError: the step does not exist.
            SettingsError: the step is the newest one, it is pinned, or the disk refuses.
        """
        if self._is_read_only("deleted"):
            return
        self.wait_until_finished()
        listed = self._steps.all()
        if step not in listed:
            raise MissingStepError(f"{self._manager.directory}: expected one of {listed} to delete, found {step}")
        self._kept.deleted.add(step)
        self._manager.retain()
        if step in self._manager.steps:
            self._kept.deleted.discard(step)
            why = "is the newest step or pinned, or the disk refuses (see the log)"
            raise SettingsError(f"{self._manager.directory}: step {step} {why}, and is not deleted")

    def reached_preemption(self, step: int) -> bool:
        """Return whether a process of the job received SIGTERM: end your loop then. That step is saved.

        Call it in every update, in all processes of a job, before or after `save`. From the first call on, SIGTERM
        does not end the process.
        """
        if self._preemption_step != step or self._is_reported:
            self._look_for_preemption(step)
        self._is_reported = True
        return self._reached

    def _check_preemption(self, step: int) -> None:
        """Check once per step, if `reached_preemption` was called or JAX's service watches for preemptions."""
        if self._preemption_step != step and (self._shutdown is not None or preemption_service() is not None):
            self._look_for_preemption(step)

    def _look_for_preemption(self, step: int) -> None:
        if self._shutdown is None:
            service = preemption_service()
            self._shutdown = GracefulShutdown(self._manager, current(), service=service, signals=("SIGTERM",))
            self._shutdown.start()
        self._preemption_step, self._reached, self._is_reported = step, self._shutdown.must_leave(), False
        if self._reached:
            self._manager.leaves()

    def wait_until_finished(self) -> None:
        """Wait until the pending save is committed. Raise its original error if it failed."""
        self._steps.wait()

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is in progress."""
        return self._manager.is_saving_in_progress()

    def check_for_errors(self) -> None:
        """Raise the original error of a failed save, once."""
        with self._steps.checked():
            self._manager.check()

    def reload(self) -> None:
        """Do nothing: a manager that only reads lists the directory each time, and one that saves owns it."""

    def close(self) -> None:
        """Wait for the pending save and release the directory. Raise the original error of a failed save."""
        try:
            self._manager.close()
        finally:
            if self._shutdown is not None:
                self._shutdown.stop()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress_secondary(error, self._manager.directory):
            self.close()


class _ListedSteps:
    """The steps that a program written for Orbax sees: committed steps that the policy keeps, and the pending step.

    A newest step that the policy does not keep is saved as temporary and not listed. In a multi-process job, every
    value that decides control flow is the same in all processes. `pending` is the last save started here, until its
    error was raised.
    """

    def __init__(self, manager: StepManager, kept: ButDeleted, best: BestByFunction | None, clock: Clock) -> None:
        self._manager, self._kept, self._best, self._clock = manager, kept, best, clock
        self._newest: CheckpointInfo | None = None
        self._restored: int | None = None  # reset when a save starts
        self.pending: PendingSave[Any] | None = None
        self._saver: threading.Thread | None = None
        self.has_saved = False

    def mark_started(
        self, step: int, metrics: Mapping[str, Any] | None, pending: PendingSave[Any], *, is_listed: bool
    ) -> None:
        self.pending, self._saver = pending, threading.current_thread()
        self._newest = self._info(step, metrics, temporary=not is_listed)
        self._restored, self.has_saved = None, True

    def _info(self, step: int, metrics: Mapping[str, Any] | None, *, temporary: bool = False) -> CheckpointInfo:
        return CheckpointInfo(step, self._clock(), None if metrics is None else {**metrics}, temporary=temporary)

    def mark_restored(self) -> None:
        self._newest, self._restored = None, self._manager.restored_step

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """If a call of the manager raises the error of a save, stop listing the step of that save."""
        try:
            yield
        except CheckpointExistsError as error:
            raise StepAlreadyExistsError(str(error).partition(";")[0]) from error
        except SettingsError:  # caused by the arguments of this call, not by the previous save
            raise
        except BaseException:
            self._newest = self.pending = None
            raise

    def wait(self) -> None:
        """Wait for the pending save. Any thread may raise its error; only the thread that saves consumes it."""
        if self.pending is not None and self._saver is not threading.current_thread():
            self.pending.wait()
            return
        with self.checked():
            self._manager.wait()

    def latest(self) -> int | None:
        if self._newest is not None and not self._newest.temporary:
            return self._newest.step
        latest, listed = self._manager.latest, [info.step for info in self.infos()]
        return latest if latest in listed else max(listed, default=None)

    def is_unlisted(self, step: int) -> bool:
        """Return whether this step or a later one is temporary."""
        return any(info.temporary and info.step >= step for info in self._every_info())

    def keeps(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Return whether the policy would keep this step if it were saved now."""
        infos = [*self.infos(), self._info(step, metrics)]
        return ask_to_preserve(self._kept, infos, context=DecisionContext(infos[-1].time))[-1]

    def is_above(self, step: int) -> bool:
        """Return whether a step is greater than the newest listed step or, after a restore, than the restored one."""
        newest = self.latest() if self._restored is None else self._restored
        return newest is None or step > newest

    def all(self) -> list[int]:
        infos, is_saving = self.infos(), self._newest is not None and self._manager.is_saving_in_progress()
        leaving = steps_to_delete(infos, self._kept, context=DecisionContext(self._clock())) if is_saving else set()
        return [info.step for info in infos if info.step not in leaving]

    def best(self) -> int | None:
        if self._best is None:
            return self.latest()
        ranked = self._best.ranked(self.infos())
        return ranked[-1].step if ranked else None

    def infos(self) -> list[CheckpointInfo]:
        return [info for info in self._every_info() if not info.temporary]

    def _every_info(self) -> list[CheckpointInfo]:
        infos, newest = self._manager.infos, self._newest
        if newest is None or any(info.step == newest.step and info.temporary == newest.temporary for info in infos):
            return infos
        return sorted([*(info for info in infos if info.step != newest.step), newest], key=lambda info: info.step)


class _MoveDeletedBackend(LocalBackend):
    """A local backend that moves deleted steps into a subdirectory of the run instead of removing them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def remove(self, path: str) -> None:
        directory, _, hidden = path.rpartition("/")
        name = final_name(hidden)
        if name is None or not is_committed(self, path):  # a file, or the attempt of a save
            return super().remove(path)
        folder = f"{directory}/{self._folder}"
        self.make_directory(folder, parents=True, sync=True)
        taken = {entry.name for entry in self.list(folder)}
        names = [name, *(f"{name}.{number}" for number in range(1, len(taken) + 1))]
        return self.rename(path, f"{folder}/{next(each for each in names if each not in taken)}")
