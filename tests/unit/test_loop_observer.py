"""The observer of a loop: its calls, their order, and the values that it may replace at a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import loop as loop_module
from jaxckpt_train.loop import LoopState
from jaxckpt_train.manager import StepManager


class RecordingObserver:
    """Records its calls, and replaces the value named `data`."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        self.notes.append(("resumed", manager.restored_step, *values))
        return {**values, "data": "instead"} if "data" in values else values

    def update_completed(self, manager: StepManager, loop: LoopState) -> None:
        assert loop.last is not None
        self.notes.append(("update", loop.step, sorted(loop.last), loop.metrics, manager.is_saved(loop.step)))

    def polled(self) -> None:
        self.notes.append(("polled",))


@pytest.fixture
def observer() -> Iterator[RecordingObserver]:
    observer = RecordingObserver()
    loop_module.observe(observer)
    yield observer
    loop_module.observe(None)


def train(directory: Path, updates: int, data: Any) -> Any:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, given = ckpt.resume({"w": np.zeros(2)}, data)
        for _ in ckpt.steps(updates):
            state = {"w": state["w"] + 1}
            ckpt(state, metrics={"loss": 0.5})
    return given


def test_observer_sees_resume_and_updates(observer: RecordingObserver, tmp_path: Path) -> None:
    train(tmp_path, 1, jct.JsonValue(1))
    train(tmp_path, 2, jct.JsonValue(2))
    seen = (["data", "state"], {"loss": 0.5}, False)
    assert observer.notes == [
        ("resumed", None, "state", "data"),
        ("update", 1, *seen),
        ("resumed", 1, "state", "data"),
        ("update", 2, *seen),
    ]


def test_observer_may_replace_the_resumed_data(observer: RecordingObserver, tmp_path: Path) -> None:
    assert train(tmp_path, 1, jct.JsonValue([7])) == "instead"
    assert jct.load_checkpointables(tmp_path / "step-0000000001", {"data": None})["data"] == jct.JsonValue([7])


def test_observer_sees_polls_of_enabled_loops(observer: RecordingObserver, tmp_path: Path) -> None:
    for enabled in (True, False):
        with jct.CheckpointCallback(tmp_path, enabled=enabled) as ckpt:
            assert not ckpt.poll()
    assert observer.notes == [("polled",)]


def test_an_error_of_the_observer_ends_the_call(observer: RecordingObserver, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("seen")

    monkeypatch.setattr(observer, "update_completed", fail)
    with pytest.raises(RuntimeError, match="seen"):
        train(tmp_path, 1, jct.JsonValue(1))
    assert jct.StepManager(tmp_path).steps == []


def test_loop_without_observer_keeps_its_data(tmp_path: Path) -> None:
    data = jct.JsonValue(3)
    assert train(tmp_path, 1, data) is data


def test_disabled_loop_is_not_observed(observer: RecordingObserver, tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, enabled=False) as ckpt:
        ckpt.resume({"w": np.zeros(2)})
        ckpt({"w": np.ones(2)})
    assert observer.notes == []
