"""Orbax checkpoints of a multi-process job: read by one process, and by a job with another sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, is_right, sharding_of, values_of
from tests.support.jobs.fixtures import JobOf

SHAPES = {"w": [12, 8], "r": [5], "b": [8, 12]}
SPECS: dict[str, list[Any]] = {"w": ["x", None], "r": [], "b": [None, "x"]}
DTYPES = {"w": "float32", "r": "int32", "b": "bfloat16"}


def state_of() -> dict[str, Any]:
    return {name: global_array(shape, [4], SPECS[name], DTYPES[name]) for name, shape in SHAPES.items()}


def saves(directory: str, how: str) -> bool:
    """Save the state of the job with Orbax."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    state = {"params": state_of(), "step": 3}
    if how == "v1":
        with v1.training.Checkpointer(directory) as checkpointer:
            checkpointer.save(7, state)
        return True
    options: dict[str, Any] = {"use_ocdbt": how != "zarr", "use_zarr3": how == "zarr3"}
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.CheckpointManager(directory, item_names=("state",), item_handlers={"state": handler}) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()
    return True


def loads(directory: str) -> list[bool]:
    """Load into other shardings in a job, and return for each array whether it is right in this process."""
    shardings = {name: sharding_of([4], ["x"] if name == "b" else []) for name in SHAPES}
    found = jct.load(f"{directory}/7", only="params/*", shardings={"params": shardings})["params"]
    return [is_right(found[name], SHAPES[name], DTYPES[name]) for name in SHAPES]


@pytest.mark.parametrize("how", ["ocdbt", "zarr", "zarr3", "v1"])
def test_checkpoint_of_two_processes_is_read_whole(tmp_path: Path, job_of: JobOf, how: str) -> None:
    assert job_of(2, 2).call(saves, str(tmp_path), how) == [True, True]
    found = jct.load(tmp_path / "7")
    assert found["step"] == 3
    for name, shape in SHAPES.items():
        expected = values_of(shape, DTYPES[name])
        assert (found["params"][name].dtype, found["params"][name].tobytes()) == (expected.dtype, expected.tobytes())
    assert job_of(4, 1).call(loads, str(tmp_path)) == [[True] * 3] * 4
