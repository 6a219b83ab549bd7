"""The manager in Orbax's form: single calls return, refuse and decide as in Orbax."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager
from jaxckpt_train.integrations.orbax_manager import CheckpointManager, CheckpointManagerOptions, args

STARTED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
BOTH = pytest.mark.parametrize("library", [ocp, orbax_manager])


class RenamedHandler(ocp.PyTreeCheckpointHandler):
    """A handler of the user, without registered args."""


@BOTH
@pytest.mark.parametrize("kind", ["StandardRestore", "PyTreeRestore"])
@pytest.mark.parametrize("item", [{"w": ..., "n": 0}, {"w": {"a": ..., "b": 0}, "n": 0}])
def test_placeholder_for_a_subtree_is_refused(library: Any, kind: str, item: Any, tmp_path: Path) -> None:
    with library.CheckpointManager(tmp_path) as manager:
        state = {"w": {"a": {"x": np.ones(2), "y": np.ones(2)}, "b": 1}, "n": 2}
        manager.save(0, args=library.args.StandardSave(state))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="a"):
            manager.restore(0, args=getattr(library.args, kind)(item))


@BOTH
def test_handler_without_args_of_its_own_takes_items(library: Any, tmp_path: Path) -> None:
    state = {"w": np.arange(4.0), "n": 2}
    with library.CheckpointManager(tmp_path / "one", ocp.Checkpointer(RenamedHandler())) as manager:
        assert manager.save(0, state)
        restored = manager.restore(0)
        assert (np.asarray(restored["w"]).tolist(), restored["n"]) == ([0.0, 1.0, 2.0, 3.0], 2)
    several = {"state": ocp.Checkpointer(RenamedHandler()), "notes": ocp.Checkpointer(ocp.JsonCheckpointHandler())}
    with library.CheckpointManager(tmp_path / "several", several) as manager:
        assert manager.save(0, {"state": state, "notes": {"lang": "en"}})
        restored = manager.restore(0)
        assert (restored.state["n"], restored.notes) == (2, {"lang": "en"})


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_to_keep": 2, "keep_time_interval": datetime.timedelta(hours=3)}, [0, 3, 6, 8, 9]),
        ({"max_to_keep": 0, "keep_time_interval": datetime.timedelta(hours=5), "keep_period": 4}, [0, 4, 5, 8]),
        ({"max_to_keep": 1, "keep_time_interval": datetime.timedelta(minutes=59)}, [*range(10)]),
    ],
)
def test_steps_are_kept_by_the_hours_between_them(options: Any, kept: list[int], tmp_path: Path) -> None:
    hours = 0

    def clock() -> datetime.datetime:
        return STARTED + datetime.timedelta(hours=hours)

    given = {"options": CheckpointManagerOptions(**options), "clock": clock}
    manager = CheckpointManager(tmp_path, **given)
    for hours in range(10):
        if hours == 5:
            manager.close()
            manager = CheckpointManager(tmp_path, **given)
        assert manager.save(hours, args=args.JsonSave(hours))
    manager.wait_until_finished()
    assert manager.all_steps() == kept
    manager.close()
    assert jct.StepManager(tmp_path).steps == sorted({*kept, 9})  # the newest step stays until the next one
