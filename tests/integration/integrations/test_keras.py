"""The callback for Keras: preempted anywhere in an epoch, `fit` resumes bit for bit."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax.trainer import JAXEpochIterator

import jaxckpt_train as jct
from jaxckpt_train.integrations.keras import KerasCheckpoint
from tests.support.compiled_once import compiled_once
from tests.support.keras_fits import (
    EPOCHS,
    INPUTS,
    STEPS,
    TARGETS,
    AskToLeave,
    Reordered,
    Shuffled,
    Watch,
    build,
    fit,
    grain_data,
)
from tests.support.signal_handlers import WATCHED, handlers_put_back
from tests.support.tiers import nightly_after

# NumPy warns about Keras' own variables when a learning rate schedule reads one.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(autouse=True)
def _as_keras_runs() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True), jax.numpy_rank_promotion("allow"):
        yield


def reading_ahead(self: Any) -> Iterator[Any]:
    """Take batches ahead of their training, as Keras does on accelerators."""
    batches = iter(self.data_adapter.get_jax_iterator())
    taken = collections.deque(itertools.islice(batches, 3))
    while taken:
        yield taken.popleft()
        taken.extend(itertools.islice(batches, 1))


# Consecutive shutdown requests: (epoch, batch) of the training or the validation, and the label of the saved step.
PLACES: dict[str, list[tuple[AskToLeave, int]]] = {
    "grain": [
        (AskToLeave(0, 0), 1),
        (AskToLeave(0, 3), 4),
        (AskToLeave(0, 4), 5),
        (AskToLeave(1, 1, validating=True), 10),
        (AskToLeave(2, 1), 12),
    ],
    "arrays": [(AskToLeave(0, 1), 2), (AskToLeave(1, 0, validating=True), 10), (AskToLeave(2, 3), 14)],
    "iterator": [(AskToLeave(1, 2), 9)],
}


@pytest.mark.parametrize("kind", ["arrays", "iterator", pytest.param("grain", marks=pytest.mark.nightly)])
def test_fit_resumes_bit_for_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fit(None, kind, alone := Watch())
    assert len(alone.batches) == EPOCHS * (STEPS if kind != "iterator" else 3)
    if kind == "grain":
        monkeypatch.setattr(JAXEpochIterator, "_get_iterator", reading_ahead)
    seen = Watch()
    for ask, label in PLACES[kind]:
        with pytest.raises(SystemExit) as left:
            fit(tmp_path, kind, seen, ask)
        assert left.value.code == 75
        assert jct.StepManager(tmp_path).latest == label
        assert ask.epoch not in seen.epochs
    assert fit(tmp_path, kind, seen) == state
    assert seen.epochs == alone.epochs
    assert seen.batches == alone.batches


def short_fit(ckpt: KerasCheckpoint, model: keras.Model | None = None, *more: Any, **arguments: Any) -> keras.Model:
    """Train on arrays without a validation."""
    model = build() if model is None else model
    given = {"x": INPUTS, "y": TARGETS, "batch_size": 8, "epochs": 2, "verbose": 0, **arguments}
    model.fit(**given, callbacks=[*more, ckpt])
    return model


def weights(model: keras.Model) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in model.get_weights()]


def test_epochs_are_saved_with_validation_metrics(tmp_path: Path) -> None:
    validation = {"validation_data": (INPUTS, TARGETS), "validation_batch_size": 20}
    short_fit(KerasCheckpoint(tmp_path, keep_best=1, best_metric="val_loss", best_mode="max"), **validation, epochs=4)
    manager = jct.StepManager(tmp_path)
    assert manager.steps == sorted({manager.best("val_loss", "max"), 20})
    assert set(manager.metadata(20).metrics) == {"loss", "mae", "val_loss", "val_mae"}


def test_last_step_within_epochs_is_saved_once(tmp_path: Path) -> None:
    short_fit(KerasCheckpoint(tmp_path / "a", save_interval_steps=4, save_every_epochs=None))
    assert jct.StepManager(tmp_path / "a").steps == [4, 8, 10]
    short_fit(KerasCheckpoint(tmp_path / "b", save_interval_steps=4, save_every_epochs=None, save_on_exit=False))
    assert jct.StepManager(tmp_path / "b").steps == [4, 8]
    events = jct.StepManager(tmp_path / "a").history.events()
    assert [event["event"] for event in events].count("save") == 3


def test_checkpoint_is_plain_tree_in_order_of_model(tmp_path: Path) -> None:
    model = short_fit(KerasCheckpoint(tmp_path))
    state = jct.load(jct.StepManager(tmp_path).path())
    assert set(state) == {"trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"}
    progress = jct.load_checkpointables(jct.StepManager(tmp_path).path())["progress"].value
    names = progress["variables"]
    assert (progress["epoch"], progress["batch"], progress["steps"]) == (2, 0, 5)
    assert names["trainable_variables"] == [each.path for each in model.trainable_variables]
    assert [len(group) for group in names.values()] == [len(state[name]) for name in names]
    seeds = [i for i, name in enumerate(names["non_trainable_variables"]) if "seed" in name]
    assert [state["non_trainable_variables"][i].tolist() for i in seeds] == [[7, 10]]  # a seed and its ten draws


def test_finished_training_continues_with_more_epochs(tmp_path: Path) -> None:
    ckpt, model = KerasCheckpoint(tmp_path), build()
    with ckpt:
        short_fit(ckpt, model)
    again = short_fit(KerasCheckpoint(tmp_path))
    assert again.optimizer.iterations == 10
    with ckpt:
        short_fit(ckpt, model, epochs=3)
    assert jct.StepManager(tmp_path).steps == [5, 10, 15]
    alone = short_fit(KerasCheckpoint("none", enabled=False), epochs=3)
    resumed = short_fit(KerasCheckpoint(tmp_path), epochs=3)
    assert weights(resumed) == weights(alone)


class Breaks(keras.callbacks.Callback):
    """Raises an error after a batch of an epoch."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._at, self._epoch = (epoch, batch), -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._at:
            raise OSError("a disk of the data")


def test_failed_training_resumes_from_last_save(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a disk of the data"), KerasCheckpoint(tmp_path, save_interval_steps=2) as ckpt:
        short_fit(ckpt, None, Breaks(1, 3))
    assert jct.StepManager(tmp_path).latest == 8
    assert weights(short_fit(KerasCheckpoint(tmp_path))) == weights(short_fit(KerasCheckpoint("none", enabled=False)))


def test_caught_error_saves_no_partial_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with KerasCheckpoint(tmp_path, save_interval_steps=2) as ckpt:
        with pytest.raises(OSError, match="a disk of the data"):
            short_fit(ckpt, None, Breaks(1, 3))
        assert jct.StepManager(tmp_path).latest in (6, 8)
    assert "weights may belong to a later update" in caplog.text
    assert jct.StepManager(tmp_path).latest == 8
    assert weights(short_fit(KerasCheckpoint(tmp_path))) == weights(short_fit(KerasCheckpoint("none", enabled=False)))


class Stops(keras.callbacks.Callback):
    """Stops the training after an epoch, as EarlyStopping does."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._last = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == self._last


def test_early_stop_is_saved_where_it_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = Stops(1)
    short_fit(KerasCheckpoint(tmp_path / "a", save_every_epochs=None), None, stop, epochs=9)
    assert jct.StepManager(tmp_path / "a").steps == [10]
    assert "put KerasCheckpoint last" not in caplog.text
    first = KerasCheckpoint(tmp_path / "b", save_every_epochs=None)
    build().fit(INPUTS, TARGETS, batch_size=8, epochs=9, verbose=0, callbacks=[first, stop])
    assert "10, is not saved: put KerasCheckpoint last" in caplog.text
    assert jct.StepManager(tmp_path / "b").steps == []


def test_data_of_unknown_position_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        short_fit(KerasCheckpoint(tmp_path), None, AskToLeave(1, 2))
    with caplog.at_level(logging.WARNING):
        short_fit(KerasCheckpoint(tmp_path))
    assert "resumed after batch 3 of epoch 2" in caplog.text


def reordered(random: str, **more: Any) -> Reordered:
    """Return a data set that shuffles with its own generator, or with NumPy's global one."""
    return Reordered(np.random.default_rng(3) if random == "own" else np.random, **more)


@pytest.mark.parametrize(
    ("random", "shuffle", "asks"),
    [
        ("own", False, [AskToLeave(0, 2), AskToLeave(2, 1)]),
        ("own", True, [AskToLeave(1, 4)]),
        ("global", True, [AskToLeave(1, 1)]),
    ],
)
def test_shuffled_data_set_resumes_in_its_order(
    random: str, shuffle: bool, asks: list[AskToLeave], tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"y": None, "batch_size": None, "epochs": EPOCHS}
    alone = build()
    alone.fit(reordered(random), epochs=EPOCHS, shuffle=shuffle, verbose=0)
    for ask in asks:
        ckpt = KerasCheckpoint(tmp_path)
        with pytest.raises(SystemExit):
            short_fit(ckpt, None, ask, x=ckpt.data(reordered(random)), shuffle=shuffle, **whole)
    ckpt = KerasCheckpoint(tmp_path)
    model = short_fit(ckpt, x=ckpt.data(reordered(random)), shuffle=shuffle, **whole)
    assert weights(model) == weights(alone)


@pytest.mark.parametrize(
    "asks", nightly_after(1, [[AskToLeave(1, 1), AskToLeave(2, 1)], [AskToLeave(1, 2)], [AskToLeave(1, STEPS - 1)]])
)
def test_data_set_resumes_with_later_initial_epoch(asks: list[AskToLeave], tmp_path: Path) -> None:
    whole: dict[str, Any] = {"y": None, "batch_size": None, "epochs": EPOCHS, "initial_epoch": 1}
    alone = build()
    alone.fit(reordered("own"), epochs=EPOCHS, initial_epoch=1, verbose=0)
    for ask in asks:
        ckpt = KerasCheckpoint(tmp_path)
        with pytest.raises(SystemExit):
            short_fit(ckpt, None, ask, x=ckpt.data(reordered("own")), **whole)
    ckpt = KerasCheckpoint(tmp_path)
    model = short_fit(ckpt, x=ckpt.data(reordered("own")), **whole)
    assert weights(model) == weights(alone)


def test_data_set_serves_fits_of_one_training(tmp_path: Path) -> None:
    ckpt = KerasCheckpoint(tmp_path / "a")
    data = ckpt.data(reordered("own"))
    model = short_fit(ckpt, x=data, y=None, batch_size=None)
    short_fit(ckpt, model, x=data, y=None, batch_size=None, epochs=EPOCHS)
    other = KerasCheckpoint(tmp_path / "b")
    whole = short_fit(other, x=other.data(reordered("own")), y=None, batch_size=None, epochs=EPOCHS)
    assert weights(model) == weights(whole)
    with pytest.raises(jct.SettingsError, match="ended epochs, found"):
        short_fit(ckpt, x=data, y=None, batch_size=None, epochs=EPOCHS + 1)


def test_data_set_without_whole_epochs_is_refused(tmp_path: Path) -> None:
    class Endless(Reordered):
        num_batches = None

    ckpt = KerasCheckpoint(tmp_path)
    for source, steps, found in [
        (Endless(np.random), None, "num_batches=None"),
        (reordered("own"), 3, "steps_per_epoch=3"),
        (reordered("own", workers=2), None, "workers=2"),
        (reordered("own", use_multiprocessing=True), None, "use_multiprocessing"),
    ]:
        with pytest.raises(jct.SettingsError, match=found):
            ckpt.data(source, steps_per_epoch=steps)


@pytest.mark.parametrize(
    ("steps_per_execution", "interval", "saved"),
    [
        (2, 3, [4, 7, 9, 12, 15]),
        (3, 4, [5, 8, 13, 15]),
        (3, 7, [8, 15]),
        (5, 1, [5, 10, 15]),
    ],
)
def test_execution_past_an_interval_is_saved(
    steps_per_execution: int, interval: int, saved: list[int], tmp_path: Path
) -> None:
    ckpt = KerasCheckpoint(tmp_path, save_interval_steps=interval, save_every_epochs=None)
    short_fit(ckpt, build(steps_per_execution=steps_per_execution), epochs=EPOCHS)
    assert jct.StepManager(tmp_path).steps == saved


def test_another_model_is_refused_by_variable_names(tmp_path: Path) -> None:
    short_fit(KerasCheckpoint(tmp_path))
    other = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(9, name="wide"), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    before = weights(other)
    with pytest.raises(jct.MismatchError, match=r"trainable_variables/0 is [a-z0-9_]*/?wide/kernel") as refused:
        short_fit(KerasCheckpoint(tmp_path), other)
    assert any("saved float32[6,4], wanted float32[6,9]" in line for line in refused.value.differences)
    assert weights(other) == before


@pytest.mark.parametrize(
    ("arguments", "compiled", "message"),
    [
        ({"batch_size": 4}, {}, "batch 3 of epoch 1 with 5 steps.* found 10"),
        ({}, {"steps_per_execution": 2}, "batch 3 .*steps_per_execution.* found 2"),
    ],
)
def test_changed_epoch_is_refused_on_resume(
    arguments: dict[str, Any], compiled: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        short_fit(KerasCheckpoint(tmp_path), None, AskToLeave(1, 2))
    with pytest.raises(jct.SettingsError, match=message):
        short_fit(KerasCheckpoint(tmp_path), build(**compiled), **arguments)


def test_rewound_batches_are_given_again(tmp_path: Path) -> None:
    data = KerasCheckpoint(tmp_path).data(Shuffled(), steps_per_epoch=3)
    first = data[0][0].tobytes()
    data.rewind()
    assert data[0][0].tobytes() == first
    second = data[0][0].tobytes()
    data.trained(1)
    assert data.position().get_state() == {"count": 1}
    assert data.iterator.get_state() == {"count": 2}
    data.rewind()
    assert data[0][0].tobytes() == second


def test_data_without_position_or_end_is_refused(tmp_path: Path) -> None:
    ckpt = KerasCheckpoint(tmp_path)
    with pytest.raises(jct.SettingsError, match="expected a Grain data set"):
        ckpt.data([1, 2, 3])
    with pytest.raises(jct.SettingsError, match="steps_per_epoch: expected a number"):
        ckpt.data(grain_data())
    with pytest.raises(jct.SettingsError, match="steps_per_epoch"):
        ckpt.data(grain_data(), steps_per_epoch=-1)


def test_evaluation_alone_saves_nothing(tmp_path: Path) -> None:
    ckpt = KerasCheckpoint(tmp_path)
    model = short_fit(ckpt)
    model.evaluate(INPUTS, TARGETS, callbacks=[ckpt], verbose=0)
    assert jct.StepManager(tmp_path).steps == [5, 10]


def test_configuration_builds_the_callback(tmp_path: Path) -> None:
    config = {"directory": str(tmp_path), "save_interval_steps": 3, "keep_latest": 1}
    short_fit(KerasCheckpoint.from_config(config, save_every_epochs=None))
    assert jct.StepManager(tmp_path).steps == [10]
    with pytest.raises(jct.SettingsError, match="save_every_epochs"):
        KerasCheckpoint(tmp_path, save_every_epochs=0)


class Closed:
    """A sink that is closed with its run."""

    made: ClassVar[list[Closed]] = []

    def __init__(self) -> None:
        self.is_closed = False
        Closed.made.append(self)

    def __call__(self, event: Any) -> None:
        assert not self.is_closed

    def close(self) -> None:
        self.is_closed = True


def test_configured_sinks_are_closed_with_their_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"directory": str(tmp_path), "sinks": [{"_target_": f"{__name__}.Closed"}]}
    ckpt = KerasCheckpoint.from_config(config)
    Closed.made.clear()
    short_fit(ckpt)
    short_fit(ckpt, epochs=3)
    assert [sink.is_closed for sink in Closed.made] == [True]
    assert "Traceback" not in caplog.text


@pytest.mark.nightly
def test_another_backend_is_refused(run_python: Any) -> None:
    program = """
import os, sys
try:
    import jaxckpt_train.integrations.keras
except ImportError as error:
    print(error)
os.environ["KERAS_BACKEND"] = "numpy"
for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
    del sys.modules[name]
from jaxckpt_train.integrations.keras import KerasCheckpoint
KerasCheckpoint("none")
"""
    done = run_python(program, env={"KERAS_BACKEND": "tensorflow"})
    assert "set KERAS_BACKEND=jax" in done.stdout
    assert "found 'numpy'" in done.stderr.splitlines()[-1]
