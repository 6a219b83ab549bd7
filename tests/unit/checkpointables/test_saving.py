"""One save of a checkpoint: what it holds, and what it leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.checkpointables.saving import CheckpointSave
from jaxckpt_train.run.saving import StepSave


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_finished_saves_are_freed_at_once(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"state": {"w": np.arange(3)}})
        manager.wait()
        with pytest.raises(jct.UnsupportedLeafError):
            manager.save(3, {"state": {"w": object()}})
        jct.save(tmp_path / "alone", {"w": np.arange(3)})
        assert [each for each in gc.get_objects() if isinstance(each, StepSave | CheckpointSave)] == []
