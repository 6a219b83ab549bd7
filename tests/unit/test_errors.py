"""Errors that are kept or sent to another process: their content stays, and what their frames hold is freed."""

from __future__ import annotations

import errno
import gc
import inspect
import pickle
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import errors
from jaxckpt_train.errors import free_frames
from tests.support.memory_backend import MemoryBackend


class Held:
    """Something that the frame of an error holds."""


def raise_holding(holders: list[weakref.ref[Held]]) -> NoReturn:
    held = Held()
    holders.append(weakref.ref(held))
    raise OSError(errno.EROFS, "refused")


def raise_a_ring(holders: list[weakref.ref[Held]]) -> NoReturn:
    """Raise an error whose context is the error that it caused."""
    try:
        try:
            raise_holding(holders)
        except OSError as error:
            raise jct.CheckpointError("refused") from error
    except jct.CheckpointError as error:
        raise (error.__cause__ or error) from None


def raise_a_group(holders: list[weakref.ref[Held]]) -> NoReturn:
    kept: list[Exception] = []
    for _ in range(2):
        try:
            raise_holding(holders)
        except OSError as error:
            kept.append(error)
    raise ExceptionGroup("two", kept)


def raise_with_both(holders: list[weakref.ref[Held]]) -> NoReturn:
    """Raise an error that has a cause, and another error as its context."""
    kept: list[Exception] = []
    try:
        raise_holding(holders)
    except OSError as error:
        kept.append(error)
    try:
        raise_holding(holders)
    except OSError:
        raise jct.CheckpointError("refused") from kept.pop()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("raise_it", [raise_holding, raise_a_ring, raise_a_group, raise_with_both])
def test_frames_are_freed_whichever_error_led_to_which(raise_it: Any) -> None:
    holders: list[weakref.ref[Held]] = []
    with pytest.raises((OSError, jct.CheckpointError, ExceptionGroup)) as raised:
        raise_it(holders)
    gc.collect()
    assert all(holder() is not None for holder in holders), "nothing was held: the test shows nothing"
    free_frames(raised.value)
    gc.collect()
    assert holders
    assert [holder() for holder in holders] == [None] * len(holders)


class Refusing(MemoryBackend):
    """Refuse to create files in attempts, with an error whose context refers back to it."""

    def create(self, path: str, *, direct: Any) -> Any:
        if ".tmp-" in path:
            raise_a_ring([])
        return super().create(path, direct=direct)


@pytest.mark.timeout(20)
def test_save_failing_with_circular_error_ends(tmp_path: Path) -> None:
    with jct.StepManager("/run", backend=Refusing()) as steps:
        steps.save(1, {"state": {"w": np.ones(3)}})
        with pytest.raises(OSError, match="refused"):
            steps.wait(10)


ARGUMENTS: dict[type[Exception], tuple[Any, ...]] = {
    jct.Preempted: ("asked to leave", 3, 75),
    jct.MismatchError: ("two differ", ("a: one", "b: two")),
    jct.NonFiniteError: ("nan", ("state/w",)),
    jct.StorageError: (errno.ENOSPC, "no space", "a/file"),
}
CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", CLASSES)
def test_error_of_worker_is_same_in_its_parent(kind: type[Exception]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what happened",)))
    error.add_note("and a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    for name in ("step", "exit_code", "differences", "leaves", "errno", "filename", "__notes__"):
        assert getattr(again, name, None) == getattr(error, name, None)
