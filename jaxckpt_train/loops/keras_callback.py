"""KerasCheckpoint: the callback for `model.fit` of Keras 3 on its JAX backend.

from jaxckpt_train.loops.keras_callback import KerasCheckpoint

with KerasCheckpoint("runs/a", keep_latest=3) as ckpt:
    model.fit(ckpt.data(loader, steps_per_epoch=100), epochs=10, callbacks=[..., ckpt])   # ckpt last
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from jaxckpt_train.callback import CheckpointCallback
from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.checkpointables.per_process_value import PerProcess
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.loops.keras_state import KerasState
from jaxckpt_train.loops.keras_steps import SkippedBatches
from jaxckpt_train.steps.besides import closing_besides
from jaxckpt_train.steps.step_save import SaveResult
from jaxckpt_train.value_checks import optional, whole

try:
    import keras  # type: ignore[import-untyped]

    from jaxckpt_train.loops.keras_data import EpochData, ReplayedDataset
except ImportError as error:
    raise ImportError(
        "KerasCheckpoint needs Keras 3 with its JAX backend: pip install 'jaxckpt-train[keras]', and set "
        f"KERAS_BACKEND=jax before Keras is imported ({error})"
    ) from error

_log = logging.getLogger("jaxckpt_train")
_UNKNOWN_DATA = (
    "resumed after batch %d of epoch %d, both counted from 1, without a position in the data: arrays go on as they "
    "would have, and so does a PyDataset whose on_epoch_end changes nothing; one that changes its order there, and "
    "data that goes on from epoch to epoch (fit(..., steps_per_epoch=...)), begin anew: give these to fit as "
    "ckpt.data(...)"
)


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
            with closing_besides(error, self._ckpt.manager.directory):
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
