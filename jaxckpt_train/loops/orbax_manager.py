"""A manager in Orbax's form: a program that uses Orbax's `CheckpointManager` moves over by changing its import.

    from jaxckpt_train.loops import orbax_manager as ocp     # was: import orbax.checkpoint as ocp

Orbax need not be installed; its own `args` and options are taken as well, also where Orbax makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from jaxckpt_train.checkpoint import load_checkpointables
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.errors import CorruptCheckpointError, SettingsError, StepNotFoundError
from jaxckpt_train.loops import orbax_args as args
from jaxckpt_train.loops.orbax_items import Items, plain
from jaxckpt_train.loops.orbax_options import (
    CheckpointManagerOptions,
    best_policy,
    preservation_policy,
    read_options,
    save_policy,
)
from jaxckpt_train.loops.orbax_policies import ButDeleted
from jaxckpt_train.loops.orbax_steps import BegunSteps, MissingStepError, StepAlreadyExistsError
from jaxckpt_train.multihost import current, preemption_service
from jaxckpt_train.outcome import Outcome
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.besides import closing_besides
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.preemption import PreemptionWatch
from jaxckpt_train.steps.refusals import refuse_flax_checkpoints, refuse_other_steps
from jaxckpt_train.steps.step_names import check_step
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.local import LocalBackend

__all__ = [
    "CheckpointManager",
    "CheckpointManagerOptions",
    "MissingStepError",
    "StepAlreadyExistsError",
    "StepMetadata",
    "args",
]

_log = logging.getLogger("jaxckpt_train")
PathLike = str | os.PathLike[str]
_ARGS = "items and their keyword arguments are given as args, such as args=args.StandardSave(item)"
_INSTEAD = {
    **dict.fromkeys(("items", "save_kwargs", "restore_kwargs"), _ARGS),
    "checkpointers": "what is saved is said by args, at save and restore",
    "handler_registry": "register an object's handler by jaxckpt_train.register_handler",
    "metadata": "pass it to save(..., custom_metadata=...), with which it is kept",
    "logger": "what happens is in history.jsonl of the directory, and logged to jaxckpt_train",
}


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """What a step holds.

    Attributes:
        item_metadata: as `CheckpointManager.item_metadata` gives it.
        metrics: numbers by name.
        custom_metadata: as given to `save`.
    """

    item_metadata: Any
    metrics: Mapping[str, float]
    custom_metadata: Any


class CheckpointManager:
    """The steps of one run, with the calls of Orbax's `CheckpointManager`.

    Steps have the numbers that they are given. A step counts from when its save has begun, as in Orbax, unless that is
    told to have failed.

    Args:
        directory: of the run.
        checkpointers, handler_registry, metadata, logger: None: the error says what to do instead.
        options: own ones, or Orbax's.
        item_names: names of the checkpointables; args tell them as well.
        item_handlers: Orbax's handlers, or None; what is saved is known by its args, and found again without.
        settings: how checkpoints are stored; None: the defaults.

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
    ) -> None:
        given = {"checkpointers": checkpointers, "metadata": metadata, "logger": logger}
        _refuse("CheckpointManager", given | {"handler_registry": handler_registry})
        self._items, self._options = Items(item_names, item_handlers), read_options(options)
        self._kept, self._best = ButDeleted(preservation_policy(self._options)), best_policy(self._options)
        self._manager = StepManager(
            os.fspath(directory),
            save_decision_policy=save_policy(self._options),
            preservation_policy=self._kept,
            settings=settings,
        )
        if self._manager.latest is None:
            refuse_other_steps(LocalBackend(), self._manager.directory)
            refuse_flax_checkpoints(LocalBackend(), self._manager.directory)
        self._steps = BegunSteps(self._manager, self._kept, self._best)
        self._watch: PreemptionWatch | None = None
        self._said: tuple[int, bool] | None = None  # whether to leave at a step, as was found out for it
        self._is_told = False  # by reached_preemption
        if self._options.create and not self._options.read_only:
            make = functools.partial(LocalBackend().make_directory, self._manager.directory, parents=True, sync=True)
            answer_of(self._manager.directory, lambda moved: make())

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
            items, save_kwargs: None.
            metrics: numbers by name.
            force: save it whatever the options say.
            args: what to save: args of `orbax_args`, of Orbax or of Grain, one, or a Composite of several by name.
            custom_metadata: plain JSON data to keep with the step.

        Returns:
            Whether it is being saved.

        Raises:
            StepAlreadyExistsError: with `force`: it is there.
            SettingsError: args cannot be honoured; or with `force`: it is below one that is there.
            The original error of the save before, if that failed.
        """
        _refuse("save", {"items": items, "save_kwargs": save_kwargs})
        step, values = check_step(step), self._items.to_save(args)
        if self._is_read_only("saved"):
            return False
        self._look_whether_to_leave(step)
        if not (force or self._steps.is_above(step)):
            return False
        metrics = None if self._options.prevent_write_metrics else metrics
        more: dict[str, Any] = {"metrics": metrics, "custom_metadata": custom_metadata, "force": bool(force)}
        result = self._steps.told(lambda: self._manager.save(step, values, **more))
        if result.pending is None:
            return False
        if self._best is not None and metrics is None:
            _log.warning("step %d: best_fn is given, and no metrics: it is never the best", step)
        self._steps.begun(step, metrics)
        self._kept.deleted.discard(step)
        finalized = self._options.finalized
        if finalized is not None:
            outcome = cast(
                "Outcome[Any]", result.pending.committed
            )  # whose error is raised later: this has not seen it
            outcome.add_done_callback(lambda done: outcome.error() is None and finalized())
        if not self._options.enable_async_checkpointing:
            self.wait_until_finished()
        return True

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
            items, restore_kwargs: None.
            directory: of another run; None: of this one.
            args: what to restore, and into which targets; None: all, as it was saved.

        Returns:
            What was restored; of several a Composite.

        Raises:
            MissingStepError: there is no such step.
            MismatchError: a target does not fit.
            CorruptCheckpointError: the step is damaged.
        """
        _refuse("restore", {"items": items, "restore_kwargs": restore_kwargs})
        source = self._manager if directory is None else StepManager(directory, settings=self._manager.settings)
        self.wait_until_finished()
        saved = self._saved(source, step)
        targets = self._items.targets(args, None if saved is None else saved.checkpointables)
        found = self._load(source, step, targets)
        return self._items.found({name: plain(value) for name, value in found.items()})

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
        """What a step holds: trees of `jax.ShapeDtypeStruct`, for targets; of several checkpointables a Composite.

        Raises:
            MissingStepError: there is no such step.
        """
        return self.metadata(step).item_metadata

    def metadata(self, step: int) -> StepMetadata:
        """What a step holds, its metrics, and what was given with it.

        Raises:
            MissingStepError: there is no such step.
        """
        if step is None:
            raise SettingsError("metadata: expected a step, found None: there is no metadata of all steps here")
        self.wait_until_finished()
        saved = self._saved(self._manager, step)
        assert saved is not None
        trees = {name: each.tree for name, each in saved.checkpointables.items()}
        return StepMetadata(self._items.found(trees), saved.metrics, saved.custom_metadata)

    def delete(self, step: int) -> None:
        """Delete a step; the newest one cannot be.

        Raises:
            MissingStepError: there is no such step.
            SettingsError: it is the newest, or pinned.
        """
        if self._is_read_only("deleted"):
            return
        self.wait_until_finished()
        if step not in self._manager.steps:
            raise MissingStepError(f"{self.directory}: expected one of {self._manager.steps} to delete, found {step}")
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
            The original error of it, if it failed.
        """
        self._steps.told(self._manager.wait)

    def is_saving_in_progress(self) -> bool:
        """Whether a save is under way."""
        return self._manager.is_saving_in_progress()

    def check_for_errors(self) -> None:
        """Raise the original error of a save that has failed, once."""
        self._steps.told(self._manager.check)

    def reload(self) -> None:
        """Nothing: who only reads looks at the directory each time, and nobody else changes that of who saves."""

    def close(self) -> None:
        """Wait for what is under way, and let go of the directory.

        Raises:
            The original error of a save that failed.
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
        with closing_besides(error, self._manager.directory):
            self.close()


def _refuse(subject: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise SettingsError(f"{subject}: {name}: expected None, found a {type(value).__name__}: {_INSTEAD[name]}")
