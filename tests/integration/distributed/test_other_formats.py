"""Checkpoints that jobs saved with other tools: Grain iterators by Orbax, and Flax arrays in a separate folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array
from tests.support.jobs.fixtures import JobOf

TAKEN, NEXT = 3, 4


def iterator_of(i: int, n: int, kind: str) -> Any:
    """The shard of process `i` of `n`, in another order for each kind."""
    if kind == "DataLoader":
        options = grain.sharding.ShardOptions(i, n)
        sampler = grain.samplers.IndexSampler(num_records=400, shard_options=options, shuffle=True, seed=1)
        return iter(grain.DataLoader(data_source=np.arange(400), sampler=sampler, worker_count=0))
    records = grain.MapDataset.range(400).shuffle(seed=5)[i::n]
    return iter(records.to_iter_dataset(grain.ReadOptions(num_threads=0)).filter(lambda x: x % (i + 2) == 0))


def own(kind: str) -> Any:
    return iterator_of(jax.process_index(), jax.process_count(), kind)


def taken(iterator: Any, count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


def saves(directory: str, kind: str) -> list[int]:
    """Save an iterator of each process with Orbax, and return the records that follow."""
    import orbax.checkpoint as ocp

    iterator = own(kind)
    taken(iterator, TAKEN * (jax.process_index() + 1))
    with ocp.CheckpointManager(directory) as manager:
        state = ocp.args.StandardSave({"w": np.arange(6.0)})
        data = grain.checkpoint.CheckpointSave(iterator)
        manager.save(7, args=ocp.args.Composite(state=state, data=data))
        manager.wait_until_finished()
    return taken(iterator, NEXT)


def resumes(directory: str, kind: str) -> list[int]:
    found = jct.load_checkpointables(f"{directory}/7", {"state": {"w": np.zeros(6)}, "data": own(kind)})
    assert found["state"]["w"].tolist() == list(range(6))
    return taken(found["data"], NEXT)


@pytest.mark.parametrize("kind", ["DataLoader", "Dataset"])
def test_each_process_resumes_at_its_own_position(tmp_path: Path, job_of: JobOf, kind: str) -> None:
    job = job_of(2, 1)
    expected = job.call(saves, str(tmp_path), kind)
    assert job.call(resumes, str(tmp_path), kind) == expected
    assert expected[0] != expected[1]
    alone = iterator_of(0, 1, kind)
    with pytest.raises(jct.IteratorStateError, match="of-2"):
        jct.load_checkpointables(tmp_path / "7", {"data": alone})
    assert taken(alone, NEXT) == taken(iterator_of(0, 1, kind), NEXT)
    states = jct.load_checkpointables(tmp_path / "7")["data"].value
    assert sorted(states) == ["process_0-of-2.json", "process_1-of-2.json"]


def saves_with_flax(directory: str) -> bool:
    import flax
    from flax.training import checkpoints
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    flax.config.update("flax_use_orbax_checkpointing", False)
    state = {"params": {"w": global_array([4, 3], [2], ["x", None]), "b": np.ones(3)}}
    manager = GlobalAsyncCheckpointManager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        checkpoints.save_checkpoint_multiprocess(directory, state, 3, gda_manager=manager)
    manager.wait_until_finished()
    return True


def test_arrays_that_flax_stored_elsewhere_are_reported(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(2, 1).call(saves_with_flax, str(tmp_path)) == [True, True]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint_3", "checkpoint_3_gda"]
    with pytest.raises(jct.UnsupportedLeafError, match=r"'params/w': .*_3_gda;"):
        jct.load(tmp_path)
