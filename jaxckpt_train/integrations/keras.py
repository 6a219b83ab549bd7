"""`KerasCheckpoint`, a callback that saves and resumes `model.fit` of Keras 3 on its JAX backend."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxckpt_train._validation import optional, refuse, whole
from jaxckpt_train.callback import CheckpointCallback
from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.checkpointables.base import JsonValue, Saved, Staged
from jaxckpt_train.checkpointables.handlers import register_handler
from jaxckpt_train.checkpointables.iterator_state import PerProcess
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import MismatchError, SettingsError, suppress_secondary

try:
    import keras  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "KerasCheckpoint needs Keras 3 with its JAX backend: pip install 'jaxckpt-train[keras]', and set "
        f"KERAS_BACKEND=jax before Keras is imported ({error})"
    ) from error
_log = logging.getLogger("jaxckpt_train")
_UNKNOWN_DATA = (
    "resumed after batch %d of epoch %d (counted from 1) without a saved data position. Data that is the same in each "
    "epoch continues where it stopped. A PyDataset that changes its order in on_epoch_end, and data that continues "
    "from epoch to epoch (fit(..., steps_per_epoch=...)), start over: pass them to fit as ckpt.data(...)"
)


class KerasCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves and resumes `model.fit`: weights, seeds, optimizer, metrics, the epoch, and the position in the data.

    A step's label is the number of completed updates. Put this callback last: changes that later callbacks make are
    not saved. It checks for a preemption after each batch, including validation batches. When preempted, it saves the
    last update and the process exits with code 75. `fit` in the next process continues after that batch: Keras calls
    the callbacks for the batches before it, but performs no update for them.

    Args:
        directory: the directory of the run.
        save_every_epochs: save at the end of every n-th epoch; None: do not save by epochs.
        settings: settings of `CheckpointCallback`, such as `save_interval_steps`, `keep_latest`, `keep_best`.

    Raises:
        SettingsError: an argument is wrong, or Keras does not use its JAX backend.
    """

    def __init__(self, directory: PathLike, *, save_every_epochs: int | None = 1, **settings: Any) -> None:
        super().__init__()
        if keras.backend.backend() != "jax":
            raise SettingsError(
                f"KerasCheckpoint: expected Keras with its JAX backend, found {keras.backend.backend()!r}: set "
                "KERAS_BACKEND=jax in the environment, or in ~/.keras/keras.json"
            )
        self._every = optional(whole(1))("KerasCheckpoint: save_every_epochs", save_every_epochs)
        self._saves_on_exit = settings.get("save_on_exit", True)
        # Makes the one for the next call of fit.
        self._new_ckpt: Callable[[], CheckpointCallback] = lambda: CheckpointCallback(directory, **settings)
        self._ckpt = self._new_ckpt()
        self._is_closed = self._is_fitting = False
        self._data: EpochData | None = None
        self._dataset: ReplayedDataset | None = None
        self._epoch = self._batch = self._before_epoch = self._completed = 0
        self._saved: int | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._random: Any = None

    @classmethod
    def from_config(cls, config: Any = None, *, save_every_epochs: int | None = 1) -> KerasCheckpoint:
        """Create the callback from a Hydra or OmegaConf node, a mapping or a `CheckpointConfig`.

        Raises:
            SettingsError: a key or value is wrong.
        """
        found = cls(save_every_epochs=save_every_epochs, **callback_arguments(config))
        # Each fit closes its sinks, so build new ones.
        found._new_ckpt = lambda: CheckpointCallback(**callback_arguments(config))
        return found

    def data(self, source: Any, steps_per_epoch: int | None = None) -> EpochData | ReplayedDataset:
        """Wrap training data for `fit(x=...)` so that its position is saved and resumed.

        Args:
            source: a Grain data set or loader, or an iterator with `get_state` and `set_state`, of batches
                `(inputs, targets)`. It continues from epoch to epoch and is reset to its start when exhausted. Or a
                `PyDataset` that changes in `on_epoch_end`; on resume this method is called again for the epochs before
                the resumed one.
            steps_per_epoch: the number of batches in each epoch; None: `len(source)`. `fit` does not need it as
                well. Must be None for a `PyDataset`.

        Raises:
            SettingsError: the source has no position that could be saved, or no length.
        """
        if isinstance(source, keras.utils.PyDataset):
            self._data, self._dataset = None, ReplayedDataset(source, steps_per_epoch)
            return self._dataset
        self._data, self._dataset = EpochData(source, steps_per_epoch), None
        return self._data

    def on_train_begin(self, logs: Any = None) -> None:
        """Resume if the run has a step."""
        self._open()
        self._state = KerasState(self.model)
        self._names = {name: [each.path for each in group] for name, group in self._state.variables().items()}
        self._random = None
        with self._closing_on_error():
            if self._data is None:
                targets = {"progress": JsonValue(None), "random": PerProcess(None)}
                _, progress, random_state = self._ckpt.resume(self._state, **targets)
                self._random = random_state.value
            else:
                self._data.rewind()
                _, _, progress = self._ckpt.resume(self._state, self._data.iterator, progress=JsonValue(None))
                self._data.begin()
        self._resumed, self._completed = progress.value, self._ckpt.completed_steps
        self._saved = self._completed if self._resumed is not None else None
        if self._resumed is None:
            self._state.restored = {}
        else:
            self._model._initial_epoch = self._resumed["epoch"]  # Keras' own BackupAndRestore uses this attribute
        self._is_fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Continue within the epoch if a previous process has started it."""
        resumed, self._resumed = self._resumed, None
        self._model._initial_epoch = None
        self._epoch, self._batch = epoch, 0 if resumed is None else resumed["batch"]
        self._before_epoch = self._completed - self._batch
        if resumed is not None:
            with self._closing_on_error():
                self._continue_epoch(resumed)
        self._random = None if self._data is not None else _random_state()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the callback on an error: `fit` does not call `on_train_end` then."""
        try:
            yield
        except BaseException as error:
            with suppress_secondary(error, self._ckpt.manager.directory):
                self.close()
            raise

    def _continue_epoch(self, resumed: Mapping[str, Any]) -> None:
        found = {"epoch": self._epoch} | ({"steps": self.params["steps"]} if self._batch else {})
        for name, value in found.items():
            if value != resumed[name]:
                raise SettingsError(
                    f"KerasCheckpoint: step {self._completed} is batch {self._batch} of epoch {resumed['epoch']} with "
                    f"{resumed['steps']} steps: expected the same {name}, found {value}. Call fit with the same "
                    "arguments as before."
                )
        if self._dataset is not None:
            self._dataset.replay(resumed.get("ended", self._epoch + 1))
        if self._random is not None:
            np.random.set_state(self._random["numpy"])
            random.setstate(self._random["python"])
        if self._data is None and self._dataset is None:
            _log.warning(_UNKNOWN_DATA, self._batch, self._epoch + 1)
        if self._batch:  # Keras has reset the metrics, and other callbacks have started the epoch
            self._state.assign(self._state.restored)
            _skip_batches(self._model, self._batch, self.params["steps"], are_taken=self._data is None)
            if self._data is not None:
                self._data.resumed(self._batch)
        self._state.restored = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if a save is due. Exit if the process was preempted."""
        steps = self.params["steps"]
        done = batch + 1 if steps is None else min(batch + 1, steps)
        if done <= self._batch:  # a skipped batch
            return
        if self._data is not None:
            self._data.trained(done - self._batch)
        self._batch, self._completed = done, self._before_epoch + done
        if done != steps:  # the last update is reported at the end of the epoch, after the validation
            self._report_update(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep the training metrics, because the validation reuses the metric variables."""
        if self._is_fitting:
            self._state.metrics = [np.array(each.value) for each in self.model.metrics_variables]

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Exit if the process was preempted. The next process repeats the validation from its start."""
        if self._is_fitting and self._ckpt.poll():
            self._report_update(None)

    def on_test_end(self, logs: Any = None) -> None:
        """Use the current metrics again: the validation is over."""
        if self._is_fitting:
            self._state.metrics = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if a save is due, including the validation metrics."""
        self._epoch, self._batch = epoch + 1, 0
        self._random = None if self._data is not None else _random_state()
        self._report_update(logs)
        is_last = epoch + 1 >= self.params["epochs"] or self._model.stop_training
        if (self._every is not None and (epoch + 1) % self._every == 0) or (is_last and self._saves_on_exit):
            self._ckpt.save_now()
            self._saved = self._completed

    def on_train_end(self, logs: Any = None) -> None:
        """Wait until the last save is committed."""
        self._model._initial_epoch = None
        if self._saved != self._completed and self._saves_on_exit:
            _log.warning("the last step, %d, is not saved: put KerasCheckpoint last in callbacks", self._completed)
        self.close()

    def _open(self) -> None:
        if self._is_closed or self._ckpt.preempted:
            self._ckpt, self._is_closed = self._new_ckpt(), False

    def _report_update(self, logs: Any) -> None:
        """Report a completed update to the `CheckpointCallback`, which saves it if a save is due."""
        progress = {"epoch": self._epoch, "batch": self._batch, "steps": self.params["steps"], "variables": self._names}
        if self._dataset is not None:  # differs from the epoch number if fit was called with an initial_epoch
            progress["ended"] = self._dataset.ended
        values: dict[str, Any] = {"progress": JsonValue(progress)}
        if self._data is None:
            values["random"] = PerProcess(self._random)
        else:
            values["data"] = self._data.position()
        metrics = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        result = self._ckpt(self._state, step=self._completed, metrics=metrics, **values)
        self._saved = self._completed if result.saved else self._saved

    def close(self) -> None:
        """Wait for the pending save and release the directory. Raise the error of a failed save. `fit` then resumes."""
        self._is_fitting, self._is_closed = False, True
        self._ckpt.close()

    def __enter__(self) -> KerasCheckpoint:
        self._open()
        self._ckpt.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_closed:
            return
        has_failed, self._is_fitting, self._is_closed = self._is_fitting and kind is None, False, True
        if has_failed and not self._ckpt.preempted:  # the caller has caught the error of fit
            _log.warning(
                "fit ended with an error. Step %d is not saved, because the weights may belong to a later update. The "
                "next fit continues from the last saved step.",
                self._completed,
            )
            self._ckpt.close()
        else:
            self._ckpt.__exit__(kind, error, trace)


def _skip_batches(model: Any, batches: int, steps: int | None, *, are_taken: bool) -> None:
    """Make the `train_function` of a model run no update for the first batches of the epoch that starts now.

    `fit` cannot start within an epoch. Skipping batches this way keeps the numbers of the batches after them. If
    `are_taken`, they are taken from the data and dropped; otherwise the data is already past them.
    """
    each = int(model.steps_per_execution)
    if batches % each and batches != steps:
        raise SettingsError(
            f"KerasCheckpoint: the run resumes after batch {batches} of an epoch: expected steps_per_execution to "
            f"divide {batches}, found {each}. Compile the model with the same steps_per_execution as before."
        )
    left, logs, train = math.ceil(batches / each), model.get_metrics_result(), model.train_function

    def skip(state: Any, iterator: Iterator[Any]) -> Any:
        nonlocal left
        if left == 0:
            model.train_function = train
            return train(state, iterator)
        left -= 1
        for _ in range(each if are_taken else 0):
            next(iterator, None)
        return dict(logs), state

    model.train_function = skip


class KerasState:
    """The variables of a compiled and built model: weights, seeds, optimizer, metrics.

    Each group is a list in the model's own order, because the names that Keras generates depend on what else the
    process has created before.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.metrics: Sequence[Any] | None = None  # saved instead of the current ones, which an evaluation overwrites
        self.restored: dict[str, list[Any]] = {}  # assigned once more after Keras and callbacks have changed the values

    def variables(self) -> dict[str, list[Any]]:
        """Return the variables of each group, with the values that the trainer holds during `fit` written back."""
        model = self.model
        model.jax_state_sync()
        return {
            "trainable_variables": list(model.trainable_variables),
            "non_trainable_variables": list(model.non_trainable_variables),
            "optimizer_variables": list(model.optimizer.variables),
            "metrics_variables": list(model.metrics_variables),
        }

    def values(self) -> dict[str, list[Any]]:
        """Return the values of the variables of each group."""
        values = {name: [variable.value for variable in group] for name, group in self.variables().items()}
        return values if self.metrics is None else values | {"metrics_variables": list(self.metrics)}

    def assign(self, values: dict[str, list[Any]]) -> None:
        """Assign values to the variables."""
        for name, group in self.variables().items():
            for variable, value in zip(group, values[name], strict=True):
                variable.assign(value)


class _KerasHandler:
    """Saves and restores a `KerasState` as a plain pytree, which loads without Keras."""

    kind = "pytree"
    early = False

    def stage(self, value: KerasState) -> Staged:
        return Staged(tree=value.values())

    def compare(self, target: KerasState, saved: Saved) -> None:
        """Raise an error with all differences to the model, and the names of its variables that differ."""
        try:
            saved.compare(_abstract(target))
        except MismatchError as error:
            groups = target.variables().items()
            paths = {f"{name}/{number}": each.path for name, group in groups for number, each in enumerate(group)}
            wrong = [leaf for leaf in paths if any(f"'{leaf}'" in line for line in error.differences)]
            names = f"\nIn the model: {'; '.join(f'{leaf} is {paths[leaf]}' for leaf in wrong)}" if wrong else ""
            raise MismatchError(f"{error}{names}", error.differences) from error

    def restore(self, target: KerasState, saved: Saved) -> KerasState:
        target.restored = saved.tree(_abstract(target))
        target.assign(target.restored)
        return target


def _abstract(state: KerasState) -> dict[str, list[Any]]:
    """Return the shapes, dtypes and shardings of the variables."""
    struct: Any = jax.ShapeDtypeStruct
    return {
        name: [struct(each.shape, each.dtype, sharding=each.value.sharding) for each in group]
        for name, group in state.variables().items()
    }


register_handler(KerasState, _KerasHandler())


class EpochData(keras.utils.PyDataset):  # type: ignore[misc]
    """Serves the batches of an iterator in epochs of a fixed length. The batches come in order, whatever the index.

    Keras may read ahead, so the position to save is the one after the batches that were trained on.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__(workers=1)  # several workers or processes would take the batches in an arbitrary order
        length = steps_per_epoch or (len(source) if hasattr(source, "__len__") else sys.maxsize)
        if length >= sys.maxsize:
            refuse("data: steps_per_epoch", "a number of batches, as the length of the data is unknown", None)
        self._steps: int = whole(1)("data: steps_per_epoch", length)
        self.iterator = source if hasattr(source, "get_state") else iter(source)
        if not (hasattr(self.iterator, "get_state") and hasattr(self.iterator, "set_state")):
            raise SettingsError(
                f"data: expected a Grain data set or loader, or an iterator with get_state and set_state, found a "
                f"{type(source).__name__}: pass other data that Keras accepts to fit directly"
            )
        self._left, self._start = int(self._steps), self._now()
        self._before: dict[int, Any] = {}  # iterator states by number of batches taken, for the batches read ahead
        self.begin()

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch, or of those left in the resumed epoch."""
        return self._left

    def __getitem__(self, index: int) -> Any:
        if self._taken > self._trained:
            self._before[self._taken] = self._now()
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.iterator.set_state(copy.deepcopy(self._start))
            batch = next(self.iterator)
        self._taken += 1
        return tuple(batch) if isinstance(batch, list) else batch

    def resumed(self, batches: int) -> None:
        """Shorten the epoch that starts now by the batches that a previous process has trained on."""
        self._left = self._steps - batches

    def on_epoch_end(self) -> None:
        """Make the next epoch a full one."""
        self._left = self._steps

    def trained(self, batches: int) -> None:
        """Count batches that were trained on."""
        self._trained += batches
        self._before = {count: state for count, state in self._before.items() if count >= self._trained}

    def position(self) -> Any:
        """Return the iterator to save, in its state after the batches that were trained on."""
        is_ahead = self._taken > self._trained
        return _AtState(self.iterator, self._before[self._trained]) if is_ahead else self.iterator

    def rewind(self) -> None:
        """Set the iterator back to its position after the batches that were trained on."""
        if self._taken > self._trained:
            if self._trained not in self._before:
                raise SettingsError(
                    "data: a previous training ended within an update, so the position is unknown: create the data anew"
                )
            self.iterator.set_state(self._before[self._trained])
        self.begin()

    def begin(self) -> None:
        """Start counting batches at the current position of the iterator."""
        self._taken = self._trained = 0
        self._before = {0: self._now()}

    def _now(self) -> Any:
        return copy.deepcopy(self.iterator.get_state())  # some iterators change the state that they returned


class ReplayedDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Makes a PyDataset resumable that changes in each epoch, for example by a shuffle in `on_epoch_end`.

    Workers are refused: they take batches of the next epoch before its order is known. `ended` is how many times
    `on_epoch_end` was called; Keras also calls it once before the first epoch.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__()
        is_parallel = source.workers > 1 or (source.workers > 0 and source.use_multiprocessing)
        if is_parallel or source.num_batches is None or steps_per_epoch is not None:
            raise SettingsError(
                "data: expected a PyDataset that is one epoch and is read by one thread, found "
                f"num_batches={source.num_batches}, steps_per_epoch={steps_per_epoch}, workers={source.workers}, "
                f"use_multiprocessing={source.use_multiprocessing}"
            )
        self._source, self.ended, self._is_in_epoch = source, 0, False

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return int(self._source.num_batches)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def on_epoch_begin(self) -> None:
        """Forward the call to the source."""
        self._is_in_epoch = True
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Forward the call to the source, except the extra call that Keras makes at the start of later `fit` calls."""
        if self._is_in_epoch or not self.ended:
            self._source.on_epoch_end()
            self.ended += 1
        self._is_in_epoch = False

    def replay(self, ended: int) -> None:
        """Replay epochs until `on_epoch_end` was called this number of times."""
        while self.ended < ended:
            self.on_epoch_begin()
            self.on_epoch_end()
        if self.ended > ended:
            raise SettingsError(
                f"data: expected a PyDataset with at most {ended} ended epochs, found {self.ended}: create a new one "
                "for each training"
            )


class _AtState:
    """An iterator that reports an earlier state. `isinstance` sees the class of the original iterator."""

    def __init__(self, iterator: Any, state: Any) -> None:
        self._iterator, self._state = iterator, state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def get_state(self) -> Any:
        return self._state


def _random_state() -> dict[str, Any]:
    """Return the states of the generators with which Keras shuffles arrays and data sets."""
    return {"numpy": np.random.get_state(), "python": random.getstate()}
