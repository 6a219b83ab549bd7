"""A notebook cell that was interrupted runs again: the older manager or callback gives up its directory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.runs import save_steps, state_of

pytestmark = pytest.mark.timeout(120)
Cell = Callable[[Path, list[Any]], None]


class Interrupting:
    """Data whose restore is interrupted, as by Ctrl-C."""

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        raise KeyboardInterrupt

    def __iter__(self) -> Iterator[int]:
        return iter(())


def in_the_loop(directory: Path, made: list[Any]) -> None:
    ckpt = jct.CheckpointCallback(directory, save_interval_steps=1)
    made.append(ckpt)
    ckpt.resume(state_of(0))
    done = ckpt.completed_steps
    steps = ckpt.steps(100)  # kept, as a progress bar keeps it
    for step in steps:
        ckpt(state_of(step + 1))
        if step == done + 2:
            raise KeyboardInterrupt


def in_resume(directory: Path, made: list[Any]) -> None:
    ckpt = jct.CheckpointCallback(directory, save_interval_steps=1)
    made.append(ckpt)
    ckpt.resume(state_of(0), Interrupting())
    ckpt(state_of(1))
    ckpt.wait()
    raise KeyboardInterrupt


def in_the_save(directory: Path, made: list[Any]) -> None:
    class Interrupts:
        def __jax_array__(self) -> Any:
            raise KeyboardInterrupt

        def get_state(self) -> Any:
            raise KeyboardInterrupt

        def set_state(self, state: Any) -> None:
            """Never called."""

        __iter__ = Interrupting.__iter__

    manager = jct.StepManager(directory)
    made.append(manager)
    step = (manager.latest or 0) + 1
    manager.save(step, {"state": state_of(step)})
    manager.save(step + 1, {"state": state_of(step), "data": Interrupts()})


@pytest.mark.parametrize("cell", [in_the_loop, in_resume, in_the_save])
def test_interrupted_cell_runs_again_each_time(tmp_path: Path, cell: Cell) -> None:
    kept, made, before = list[BaseException](), list[Any](), signal.getsignal(signal.SIGTERM)
    for run in range(4):
        with pytest.raises(KeyboardInterrupt) as caught:
            cell(tmp_path, made)
        kept.append(caught.value)  # with its frames, and all that is in them
        for old in made[:-1]:
            with pytest.raises(jct.SettingsError, match="newer"):
                old.save(99, state_of(99) if hasattr(old, "resume") else {"state": state_of(99)})
        assert len(made) == run + 1
    made[-1].close()
    assert signal.getsignal(signal.SIGTERM) is before
    expected = {in_the_loop: [*range(1, 13)], in_resume: [1], in_the_save: [1, 2, 3, 4]}[cell]
    assert jct.StepManager(tmp_path).steps == expected


@pytest.mark.parametrize("makes", [jct.StepManager, jct.CheckpointCallback])
def test_manager_within_with_keeps_its_directory(tmp_path: Path, makes: Any) -> None:
    options = {} if makes is jct.StepManager else {"save_interval_steps": 1}
    with makes(tmp_path, **options) as first:
        getattr(first, "manager", first).own()
        with pytest.raises(jct.DirectoryLockedError, match="close"):
            jct.StepManager(tmp_path).own()


def test_manager_of_other_thread_keeps_its_directory(tmp_path: Path) -> None:
    first, saved, ends = jct.StepManager(tmp_path), threading.Event(), threading.Event()

    def use() -> None:
        save_steps(first, 1)
        saved.set()
        assert ends.wait(60)
        save_steps(first, 2)

    user = threading.Thread(target=use)
    user.start()
    assert saved.wait(60)
    second = jct.StepManager(tmp_path)
    with pytest.raises(jct.DirectoryLockedError, match="close"):
        second.own()
    ends.set()
    user.join()
    second.own()  # that thread has ended
    assert second.steps == [1, 2]
    second.close()
