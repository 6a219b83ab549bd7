"""Errors while a `with` statement closes a run: a clean exit does not hide them, and an interrupt is raised."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.interrupts import once_waiting
from tests.support.runs import state_of

SETTINGS = jct.StoreSettings(nonfinite="reject")
FAILING = {"w": np.full(4, np.nan)}


def by_a_manager(directory: Path, error: BaseException) -> None:
    with jct.StepManager(directory, settings=SETTINGS) as manager:
        manager.save(1, {"state": FAILING})
        raise error


def by_a_callback(directory: Path, error: BaseException) -> None:
    with jct.CheckpointCallback(directory, save_interval_steps=1, store=SETTINGS) as ckpt:
        ckpt.resume(FAILING)
        for _ in ckpt.steps(1):
            ckpt(FAILING)
        raise error


BOTH = pytest.mark.parametrize("run", [by_a_manager, by_a_callback])


@BOTH
@pytest.mark.parametrize("well", [SystemExit(), SystemExit(0), SystemExit(False), SystemExit(256)], ids=repr)
def test_clean_exit_with_failed_save_raises(tmp_path: Path, run: Callable[..., None], well: SystemExit) -> None:
    with pytest.raises(jct.NonFiniteError) as caught:
        run(tmp_path, well)
    assert caught.value.__context__ is well


@BOTH
@pytest.mark.parametrize(
    "error", [SystemExit(7), SystemExit("text"), KeyboardInterrupt(), ValueError("of the loop")], ids=repr
)
def test_original_error_notes_the_second_one(
    tmp_path: Path, run: Callable[..., None], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)) as caught:
        run(tmp_path, error)
    assert caught.value is error
    assert "hold" in error.__notes__[0]
    assert "closing" in caplog.text


def test_closing_a_generator_raises_failed_save(tmp_path: Path) -> None:
    def training() -> Iterator[int]:
        with jct.StepManager(tmp_path, settings=SETTINGS) as manager:
            manager.save(1, {"state": FAILING})
            yield 1

    steps = training()
    next(steps)
    with pytest.raises(jct.NonFiniteError):
        steps.close()  # type: ignore[attr-defined]


def test_cancelling_a_task_reports_failed_save(tmp_path: Path) -> None:
    async def training() -> None:
        with jct.StepManager(tmp_path, settings=SETTINGS) as manager:
            manager.save(1, {"state": FAILING})
            await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(training())
        await asyncio.sleep(0)  # it waits now
        task.cancel()
        await task

    with pytest.raises(jct.NonFiniteError):
        asyncio.run(cancelled())


@pytest.mark.parametrize("error", [ValueError("of the loop"), SystemExit(0), SystemExit(7)], ids=repr)
def test_interrupt_during_close_replaces_the_first_error(tmp_path: Path, error: BaseException) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    backend = HoldingBackend("rename", "step-0000000001")
    try:
        with pytest.raises(KeyboardInterrupt) as caught, callback_on(backend, tmp_path, save_interval_steps=1) as ckpt:
            ckpt.resume(state_of(0))
            ckpt(state_of(1))
            once_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            raise error
    finally:
        backend.go.set()
        signal.signal(signal.SIGINT, before)
    assert caught.value.__context__ is error
