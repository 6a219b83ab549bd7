"""KerasCheckpoint: the callback for `model.fit` of Keras 3 on its JAX backend.

from jaxckpt_train.integrations.keras import KerasCheckpoint

with KerasCheckpoint("runs/a", keep_latest=3) as ckpt:
    model.fit(ckpt.data(loader, steps_per_epoch=100), epochs=10, callbacks=[..., ckpt])   # ckpt last

A data iterator in epochs for Keras' `fit`, of which it is known at each moment where the training stands in it.

The variables of a Keras model as a checkpointable: taken when they are saved, and restored in place.

The batches of an epoch that were trained on before: Keras counts them, and no update is done.
"""

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

from jaxckpt_train._validation import optional, whole
from jaxckpt_train.callback import CheckpointCallback
from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.checkpointables.base import Saved, Staged
from jaxckpt_train.checkpointables.iterator_state import PerProcess
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.checkpointables.registry import register_handler
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import MismatchError, SettingsError, suppress_secondary
from jaxckpt_train.run.saving import SaveResult

try:
    import keras  # type: ignore[import-untyped]

except ImportError as error:
    raise ImportError(
        "KerasCheckpoint needs Keras 3 with its JAX backend: pip install 'jaxckpt-train[keras]', and set "
        f"KERAS_BACKEND=jax before Keras is imported ({error})"
    ) from error
GROUPS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
_log = logging.getLogger("jaxckpt_train")
_UNKNOWN_DATA = (
    "resumed after batch %d of epoch %d, both counted from 1, without a position in the data: arrays go on as they "
    "would have, and so does a PyDataset whose on_epoch_end changes nothing; one that changes its order there, and "
    "data that goes on from epoch to epoch (fit(..., steps_per_epoch=...)), begin anew: give these to fit as "
    "ckpt.data(...)"
)


class SkippedBatches:
    """Stands for a model's `train_function` until so many batches were counted.

    `fit` has no place to begin within an epoch, and batches have the numbers that they had.

    Args:
        model: of Keras, which begins the epoch.
        batches: how many.
        steps: batches in the epoch; None: not known.
        are_taken: whether they are taken from the data and dropped; else the data is behind them already.

    Raises:
        SettingsError: one execution of several steps would do some of them, and others.
    """

    def __init__(self, model: Any, batches: int, steps: int | None, are_taken: bool) -> None:
        self._model, self._each, self._are_taken = model, int(model.steps_per_execution), are_taken
        if batches % self._each and batches != steps:
            raise SettingsError(
                f"KerasCheckpoint: batch {batches} of an epoch was the last that was trained on; expected "
                f"steps_per_execution to divide that, found {self._each}: compile the model as before"
            )
        self._left = math.ceil(batches / self._each)
        self._logs: dict[str, Any] = model.get_metrics_result()

    def install(self) -> None:
        """Begin."""
        self._function, self._model.train_function = self._model.train_function, self

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        """What `train_function` gives: the logs, which are those of the batch trained on last, and the state."""
        if self._left == 0:
            self._model.train_function = self._function
            return self._function(state, iterator)
        self._left -= 1
        for _ in range(self._each if self._are_taken else 0):
            next(iterator, None)
        return dict(self._logs), state


class KerasState:
    """The variables of a compiled and built model: weights, seeds, optimizer, metrics.

    Each group is a list in the model's own order: names of variables that Keras makes up depend on what else a process
    has made before.

    Args:
        model: of Keras, on its JAX backend.

    Attributes:
        metrics: values of the metrics to save in place of the current ones, which an evaluation uses for itself; None:
            the current ones.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.metrics: Sequence[Any] | None = None
        self._restored: dict[str, list[Any]] | None = None

    def variables(self) -> dict[str, list[Any]]:
        """The variables of each group. While a model is being fitted its trainer has the values, which are put back."""
        self.model.jax_state_sync()
        optimizer = self.model.optimizer
        groups = {name: list(getattr(self.model, name)) for name in GROUPS if name != "optimizer_variables"}
        return groups | {"optimizer_variables": [] if optimizer is None else list(optimizer.variables)}

    def values(self) -> dict[str, list[Any]]:
        """Their values."""
        values = {name: [variable.value for variable in group] for name, group in self.variables().items()}
        return values if self.metrics is None else values | {"metrics_variables": list(self.metrics)}

    def take_over(self, values: dict[str, list[Any]]) -> None:
        """Give the variables these values."""
        for name, group in self.variables().items():
            for variable, value in zip(group, values[name], strict=True):
                variable.assign(value)

    def restored(self, values: dict[str, list[Any]]) -> None:
        """Give the variables what was restored, and keep it for `again`."""
        self.take_over(values)
        self._restored = values

    def again(self) -> None:
        """Give the variables once more what was restored, if it was, as Keras and others have touched them since."""
        if self._restored is not None:
            self.take_over(self._restored)
        self.forget()

    def forget(self) -> None:
        """Keep nothing of what was restored."""
        self._restored = None


class KerasHandler:
    """A KerasState. A checkpoint of one is a plain pytree, which loads without Keras."""

    kind = "pytree"
    early = False

    def stage(self, value: KerasState) -> Staged:
        """The values as they are now."""
        return Staged(tree=value.values())

    def compare(self, target: KerasState, saved: Saved) -> None:
        """Raise all differences to the model, with the names of its variables.

        Raises:
            MismatchError: there are some.
        """
        try:
            saved.compare(_abstract(target))
        except MismatchError as error:
            names = _named(target, error.differences)
            raise MismatchError(f"{error}{names}", error.differences) from error

    def restore(self, target: KerasState, saved: Saved) -> KerasState:
        """The target, its model's variables set to what was saved."""
        target.restored(saved.tree(_abstract(target)))
        return target


def _abstract(state: KerasState) -> dict[str, list[Any]]:
    """What the variables want: arrays where they are."""
    struct: Any = jax.ShapeDtypeStruct
    return {
        name: [struct(each.shape, each.dtype, sharding=each.value.sharding) for each in group]
        for name, group in state.variables().items()
    }


def _named(state: KerasState, differences: Sequence[str]) -> str:
    """The names in the model of those leaves that differ."""
    paths = {f"{name}/{i}": each.path for name, group in state.variables().items() for i, each in enumerate(group)}
    found = [f"{leaf} is {path}" for leaf, path in paths.items() if any(f"'{leaf}'" in line for line in differences)]
    return f"\nIn the model: {'; '.join(found)}" if found else ""


register_handler(KerasState, KerasHandler())


class EpochData(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of an iterator, so many in each epoch. They are taken one after the other, whatever index is asked for.

    Keras may read ahead (on accelerators by a batch, and a batch or two before it trains): the position is that after
    the batches that were trained on. An iterator that ends begins anew.

    Args:
        source: a data set or loader of Grain, or an iterator with `get_state` and `set_state`.
        steps_per_epoch: batches in each epoch; None: as many as `len(source)`.

    Attributes:
        iterator: of the source.

    Raises:
        SettingsError: it has no position that could be saved, or no length.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__(workers=1)  # more of them, or processes, would take batches elsewhere and in any order
        self._steps = whole(1)("data: steps_per_epoch", steps_per_epoch or _length(source))
        self.iterator = source if hasattr(source, "get_state") else iter(source)
        if not (hasattr(self.iterator, "get_state") and hasattr(self.iterator, "set_state")):
            raise SettingsError(
                f"data: expected a Grain data set or loader, or an iterator with get_state and set_state, found a "
                f"{type(source).__name__}: Keras' own data is given to fit as it is"
            )
        self._left: int = self._steps
        self._start = self._now()
        self._before: dict[int, Any] = {}  # states of the iterator after so many batches, where more were taken
        self.begin()

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, or those that are left of the one that was resumed."""
        return self._left

    def __getitem__(self, index: int) -> Any:
        """The next batch."""
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
        """Of the epoch that begins so many batches were trained on before."""
        self._left = self._steps - batches

    def on_epoch_end(self) -> None:
        """The next epoch is a whole one."""
        self._left = self._steps

    def trained(self, batches: int) -> None:
        """So many more were trained on."""
        self._trained += batches
        self._before = {count: state for count, state in self._before.items() if count >= self._trained}

    def position(self) -> Any:
        """What is to be saved: the iterator, or what stands for it as it was after the batches trained on."""
        is_ahead = self._taken > self._trained
        return ReadAhead(self.iterator, self._before[self._trained]) if is_ahead else self.iterator

    def rewind(self) -> None:
        """Go back to after the batches trained on: others were only looked at.

        Raises:
            SettingsError: it is not known where that is.
        """
        if self._taken > self._trained:
            if self._trained not in self._before:
                raise SettingsError("data: a training was broken off within an update; make the data anew")
            self.iterator.set_state(self._before[self._trained])
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on, at the position where the iterator is now."""
        self._taken = self._trained = 0
        self._before = {0: self._now()}

    def _now(self) -> Any:
        return copy.deepcopy(self.iterator.get_state())  # some keep what they have given, and change it


class ReplayedDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """A PyDataset that changes from epoch to epoch, such as by a shuffle in `on_epoch_end`, and can be resumed.

    Args:
        source: new, as in a process that has not trained yet.
        steps_per_epoch: None.

    Attributes:
        ended: how many epochs have ended, one before the first included.

    Raises:
        SettingsError: it has no end, another number of steps is wanted, or Keras would read it by workers, which take
            batches of the next epoch before its order is known.
    """

    def __init__(self, source: Any, steps_per_epoch: int | None) -> None:
        super().__init__()
        found = {
            "one without an end": source.num_batches is None,
            f"steps_per_epoch={steps_per_epoch!r}": steps_per_epoch is not None,
            f"workers={source.workers}": source.workers > 1,
            "use_multiprocessing=True": source.workers > 0 and source.use_multiprocessing,
        }
        if any(found.values()):
            wrong = ", ".join(name for name, is_so in found.items() if is_so)
            raise SettingsError(
                f"data: expected a PyDataset that is an epoch by itself and is read by one thread, found {wrong}; "
                "where its order does not matter, give it to fit as it is"
            )
        self._source, self.ended, self._has_begun = source, 0, False

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return int(self._source.num_batches)

    def __getitem__(self, index: int) -> Any:
        """The batch that the source has there now."""
        return self._source[index]

    def on_epoch_begin(self) -> None:
        """Tell the source."""
        self._has_begun = True
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the source, but not once more at the begin of each further `fit`, as Keras does."""
        if self._has_begun or not self.ended:
            self._source.on_epoch_end()
            self.ended += 1
        self._has_begun = False

    def replay(self, ended: int) -> None:
        """Bring the source to its state after this number of ended epochs. Keras ends one before the first, too.

        Raises:
            SettingsError: it is beyond that.
        """
        while self.ended < ended:
            self.on_epoch_begin()
            self.on_epoch_end()
        if self.ended > ended:
            raise SettingsError("data: this PyDataset has been trained with before; make it anew for each training")


def _length(source: Any) -> int:
    length = len(source) if hasattr(source, "__len__") else sys.maxsize
    if length >= sys.maxsize:
        raise SettingsError(
            f"data: steps_per_epoch: expected a number of batches, since this {type(source).__name__} has no end"
        )
    return length


class ReadAhead:
    """An iterator as it was before it was read ahead, for who saves its state: of the same class, with that state."""

    def __init__(self, iterator: Any, state: Any) -> None:
        self._iterator, self._state = iterator, state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def get_state(self) -> Any:
        """The state that it had."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Not what this is for.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("a position that was saved is not set; set the iterator")


class KerasCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves and resumes `model.fit`: weights, seeds, optimizer, metrics, the epoch, and the position in the data.

    A step's label is the number of completed updates. Put it last among the callbacks: what those after it change is
    not in what it saves. A request to leave is noticed after each batch, also of a validation: the last update is
    saved, and the process leaves with exit code 75. `fit` in the next process goes on after that batch: for those
    before it callbacks are called, but no update is done.

    Args:
        directory: of the run.
        save_every_epochs: save at the end of each so manieth epoch; None: not by epochs.
        settings: those of `CheckpointCallback`, such as `save_interval_steps`, `keep_latest`, `keep_best`.

    Raises:
        SettingsError: an argument is wrong, or Keras has another backend.
    """

    def __init__(self, directory: PathLike, *, save_every_epochs: int | None = 1, **settings: Any) -> None:
        super().__init__()
        if keras.backend.backend() != "jax":
            raise SettingsError(
                f"KerasCheckpoint: expected Keras with its JAX backend, found {keras.backend.backend()!r}: set "
                "KERAS_BACKEND=jax in the environment, or in ~/.keras/keras.json"
            )
        self._every = optional(whole(1))("KerasCheckpoint: save_every_epochs", save_every_epochs)
        self._settings: dict[str, Any] = {"directory": directory, **settings}
        self._new_settings: Callable[[], dict[str, Any]] = lambda: self._settings  # for another run of the callback
        self._ckpt = CheckpointCallback(**self._settings)
        self._is_closed = self._is_fitting = False
        self._data: EpochData | None = None
        self._dataset: ReplayedDataset | None = None
        self._epoch = self._batch = self._before_epoch = self._completed = 0
        self._saved: int | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._random: Any = None

    @classmethod
    def from_config(cls, config: Any = None, *, save_every_epochs: int | None = 1) -> KerasCheckpoint:
        """Build it from a Hydra or OmegaConf node, a mapping or a CheckpointConfig.

        Raises:
            SettingsError: a key or value is wrong.
        """
        found = cls(save_every_epochs=save_every_epochs, **callback_arguments(config))
        found._new_settings = lambda: callback_arguments(config)  # its sinks are closed with each run
        return found

    def data(self, source: Any, steps_per_epoch: int | None = None) -> EpochData | ReplayedDataset:
        """Data to give to `fit` as `x`, whose position is saved and resumed.

        Args:
            source: a data set or loader of Grain, or an iterator with `get_state` and `set_state`, of batches
                `(inputs, targets)`. It goes on from epoch to epoch, and begins anew when it ends. Or a `PyDataset`
                that changes in `on_epoch_end`: that is called again for the epochs before the one that is resumed.
            steps_per_epoch: batches in each epoch; None: as many as `len(source)`. `fit` does not need it. Not for a
                `PyDataset`.

        Raises:
            SettingsError: the source has no position, or no length.
        """
        if isinstance(source, keras.utils.PyDataset):
            self._data, self._dataset = None, ReplayedDataset(source, steps_per_epoch)
            return self._dataset
        self._data, self._dataset = EpochData(source, steps_per_epoch), None
        return self._data

    def on_train_begin(self, logs: Any = None) -> None:
        """Resume, if there is a step."""
        self._open()
        self._state = KerasState(self.model)
        self._names = {name: [each.path for each in group] for name, group in self._state.variables().items()}
        values: dict[str, Any] = {"progress": JsonValue(None)}
        if self._data is None:
            values["random"] = PerProcess(None)
        else:
            self._data.rewind()
            values["data"] = self._data.iterator
        with self._closing_on_error():
            _, *found = self._ckpt.resume(self._state, **values)
        restored = dict(zip([name for name in ("data", "progress", "random") if name in values], found, strict=True))
        if self._data is not None:
            self._data.begin()
        self._resumed, self._completed = restored["progress"].value, self._ckpt.completed_steps
        self._random = restored["random"].value if "random" in restored else None
        self._saved = self._completed if self._resumed is not None else None
        if self._resumed is None:
            self._state.forget()
        else:
            self._model._initial_epoch = self._resumed["epoch"]  # which Keras has for its own BackupAndRestore
        self._is_fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Go on within the epoch, if it was begun before."""
        resumed, self._resumed = self._resumed, None
        self._model._initial_epoch = None
        self._epoch, self._batch = epoch, 0 if resumed is None else resumed["batch"]
        self._before_epoch = self._completed - self._batch
        if resumed is not None:
            with self._closing_on_error():
                self._go_on(resumed)
        self._random = None if self._data is not None else _random_state()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Within: nothing is fitted if this fails, and nobody but a `with` would close it."""
        try:
            yield
        except BaseException as error:
            with suppress_secondary(error, self._ckpt.manager.directory):
                self.close()
            raise

    def _go_on(self, resumed: Mapping[str, Any]) -> None:
        found = {"epoch": self._epoch} | ({"steps": self.params["steps"]} if self._batch else {})
        for name, value in found.items():
            if value != resumed[name]:
                raise SettingsError(
                    f"KerasCheckpoint: step {self._completed} is batch {self._batch} of epoch {resumed['epoch']} with "
                    f"{resumed['steps']} steps; expected the same {name}, found {value}: fit as before"
                )
        if self._dataset is not None:
            self._dataset.replay(resumed.get("ended", self._epoch + 1))
        if self._random is not None:
            _set_random_state(self._random)
        if self._data is None and self._dataset is None:
            _log.warning(_UNKNOWN_DATA, self._batch, self._epoch + 1)
        if self._batch:  # Keras has begun the metrics anew, and callbacks the epoch
            self._state.again()
            SkippedBatches(self._model, self._batch, self.params["steps"], self._data is None).install()
            if self._data is not None:
                self._data.resumed(self._batch)
        self._state.forget()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is due, and leave if asked to."""
        steps = self.params["steps"]
        done = batch + 1 if steps is None else min(batch + 1, steps)
        if done <= self._batch:  # it was trained on before
            return
        if self._data is not None:
            self._data.trained(done - self._batch)
        self._batch, self._completed = done, self._before_epoch + done
        if done != steps:  # else at the end of the epoch, when a validation is over
            self._tell(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """A validation uses the metrics for itself: keep those of the training."""
        if self._is_fitting:
            self._state.metrics = [np.array(each.value) for each in self.model.metrics_variables]

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Within a validation, leave if asked to: it begins anew in the next process."""
        if self._is_fitting and self._ckpt.poll():
            self._tell(None)

    def on_test_end(self, logs: Any = None) -> None:
        """The metrics are those of the training again, or of nobody."""
        if self._is_fitting:
            self._state.metrics = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if it is due, with the metrics of the validation too."""
        self._epoch, self._batch = epoch + 1, 0
        self._random = None if self._data is not None else _random_state()
        self._tell(logs)
        is_last = epoch + 1 >= self.params["epochs"] or self._model.stop_training
        is_due = self._every is not None and (epoch + 1) % self._every == 0
        if is_due or (is_last and self._settings.get("save_on_exit", True)):
            self._ckpt.save_now()
            self._saved = self._completed

    def on_train_end(self, logs: Any = None) -> None:
        """Wait until all is on the disk."""
        self._model._initial_epoch = None
        if self._saved != self._completed and self._settings.get("save_on_exit", True):
            _log.warning("step %d, the last, is not saved: put KerasCheckpoint last in callbacks", self._completed)
        self.close()

    def _open(self) -> None:
        if self._is_closed or self._ckpt.preempted:
            self._ckpt, self._is_closed = CheckpointCallback(**self._new_settings()), False

    def _tell(self, logs: Any) -> SaveResult:
        """An update is complete, and what was said of it so far is what a save of it saves."""
        progress = {"epoch": self._epoch, "batch": self._batch, "steps": self.params["steps"], "variables": self._names}
        if self._dataset is not None:  # not the number of the epoch where fit began with a later one
            progress["ended"] = self._dataset.ended
        more: dict[str, Any] = {"progress": JsonValue(progress)}
        if self._data is None:
            more["random"] = PerProcess(self._random)
        else:
            more["data"] = self._data.position()
        metrics = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        result = self._ckpt(self._state, step=self._completed, metrics=metrics, **more)
        self._saved = self._completed if result.saved else self._saved
        return result

    def close(self) -> None:
        """Wait for what is under way, and let go of the directory; the next `fit` resumes.

        Raises:
            Exception: the original error of a save that failed.
        """
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
        was_left, self._is_fitting, self._is_closed = self._is_fitting and kind is None, False, True
        if was_left and not self._ckpt.preempted:  # by an error that was caught outside
            _log.warning(
                "fit was left by an error: step %d is not saved at the end, as the weights may be of a later update; "
                "the next fit goes on from the last saved step",
                self._completed,
            )
            self._ckpt.close()
        else:
            self._ckpt.__exit__(kind, error, trace)


def _random_state() -> dict[str, Any]:
    """Of the generators that Keras shuffles arrays and data sets with."""
    return {"numpy": np.random.get_state(), "python": random.getstate()}


def _set_random_state(state: Mapping[str, Any]) -> None:
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
