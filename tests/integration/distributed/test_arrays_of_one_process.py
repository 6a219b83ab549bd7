"""Arrays on the devices of one process, or of some processes of a job: their holders save and load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.integration.distributed.test_parallel_saves import written_by
from tests.support.jobs.arrays import global_array, holds, placed, sharding_of, values_of
from tests.support.jobs.fixtures import JobOf
from tests.support.tiers import nightly_after

MESHES: dict[str, tuple[list[int], list[Any], list[int]]] = {
    "stage0": ([2], ["x"], [0, 1]),
    "stage1": ([2], [], [2, 3]),
    "stage2": ([1], [], [5]),
    "some": ([2, 2], ["x"], [2, 3, 4, 5]),
    "cut": ([4], ["x"], [0, 2, 4, 5]),
}
SHAPE = [8, 64]


def state_of(more: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {
        name: placed(values_of(SHAPE) + number, sharding_of(mesh, spec, devices))
        for number, (name, (mesh, spec, devices)) in enumerate(MESHES.items())
    }
    alone = sharding_of([1], [], [3])
    tree["key"] = key_on(alone)
    if more:  # arrays of all processes must still be divided equally among the writers
        tree |= {f"all{number}": global_array([512, 1024], [6], []) for number in range(3)}
        tree |= {"count": 3, "table": np.arange(5), "local": jax.numpy.arange(7.0)}
    return tree


def key_on(place: jax.sharding.Sharding) -> jax.Array:
    dtype = jax.random.key(0).dtype
    mine = [jax.device_put(jax.random.key(11), device) for device in place.addressable_devices]
    return jax.make_array_from_single_device_arrays((), place, mine, dtype=dtype)


def target_of(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array) and name != "local"
        else leaf
        for name, leaf in tree.items()
    }


def wrong_in(loaded: dict[str, Any], tree: dict[str, Any]) -> list[str]:
    wrong = [
        name
        for number, name in enumerate(MESHES)
        if not holds(loaded[name], values_of(SHAPE) + number) or loaded[name].sharding != tree[name].sharding
    ]
    keys = [jax.random.key_data(shard.data).tolist() for shard in loaded["key"].addressable_shards]
    if keys != [jax.random.key_data(jax.random.key(11)).tolist()] * len(tree["key"].addressable_shards):
        wrong.append("key")
    return wrong


def save_and_load(path: str, snapshot: str, more: bool, read_once: bool) -> list[str]:
    tree = state_of(more)
    jct.save(path, tree, settings=jct.StoreSettings(snapshot=snapshot, durability="none"))  # type: ignore[arg-type]
    settings = jct.StoreSettings(read_once=read_once)
    return wrong_in(jct.load(path, target_of(tree), settings=settings), tree)


WAYS = [("auto", False, True), ("host", True, False), ("device", True, True), ("stream", False, False)]


@pytest.mark.parametrize(
    ("snapshot", "more", "read_once"),
    nightly_after(len(WAYS), [*WAYS, *((snapshot, not more, read_once) for snapshot, more, read_once in WAYS)]),
)
def test_each_process_saves_and_loads_what_it_has(
    tmp_path: Path, job_of: JobOf, snapshot: str, more: bool, read_once: bool
) -> None:
    path = tmp_path / "c"
    assert job_of(3, 2).call(save_and_load, str(path), snapshot, more, read_once) == [[]] * 3
    assert jct.verify(path).ok
    found = jct.load(path)
    for number, name in enumerate(MESHES):
        assert found[name].tobytes() == (values_of(SHAPE) + number).tobytes(), name
    if not more:
        one = values_of(SHAPE).nbytes
        written = written_by(path)
        assert (written[0], sum(written.values())) == (one + one // 4, 5 * one + 8)


def save_and_load_one(path: str, owner: int) -> list[str]:
    """Save and load a tree of one array of one process: the other processes have nothing to read."""
    place = sharding_of([1], [], [2 * owner])
    tree = {"w": placed(values_of(SHAPE), place)}
    for step in (1, 2):
        jct.save(f"{path}/{step}", tree)
        tree = jct.load(f"{path}/{step}", target_of(tree))
    everywhere = sharding_of([6], [])
    alike = jct.load(f"{path}/2", {"w": jax.ShapeDtypeStruct(tuple(SHAPE), np.dtype("float32"), sharding=everywhere)})
    return [
        f"{owner}: {name}"
        for name, found in (("own", tree["w"]), ("everywhere", alike["w"]))
        if not holds(found, values_of(SHAPE))
    ]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_single_array_of_one_process_loads(tmp_path: Path, job_of: JobOf, owner: int) -> None:
    assert job_of(3, 2).call(save_and_load_one, str(tmp_path / "c"), owner) == [[]] * 3


def run_pipeline(path: str) -> list[str]:
    with jct.CheckpointCallback(path, save_interval_steps=1) as ckpt:
        state = ckpt.resume(state_of(more=True))
        first = ckpt.completed_steps
        for _ in ckpt.steps(first + 2):
            ckpt(state)
    return [*wrong_in(state, state_of(more=True)), *([] if first in (0, 2) else [str(first)])]


def test_run_resumes_with_arrays_of_single_processes(tmp_path: Path, job_of: JobOf) -> None:
    for _ in range(2):
        assert job_of(3, 2).call(run_pipeline, str(tmp_path / "run")) == [[]] * 3


def reuse_after_restore(path: str) -> dict[str, bool]:
    """Return for each local array whether a step reuses its memory when the array is donated."""
    with jct.StepManager(path) as manager:
        manager.save(1, {"state": state_of(more=True)}, force=True)
        manager.wait()
        state = manager.restore({"state": state_of(more=True)})["state"]
    step = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    reused = {}
    for name in (*sorted(MESHES), "all0"):
        if state[name].addressable_shards:
            before = [shard.data.unsafe_buffer_pointer() for shard in state[name].addressable_shards]
            after = jax.block_until_ready(step(state[name]))
            reused[name] = before == [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards]
    return reused


def test_restored_arrays_of_job_can_be_donated(tmp_path: Path, job_of: JobOf) -> None:
    found = job_of(3, 2).call(reuse_after_restore, str(tmp_path / "run"))
    assert [sorted(each) for each in found] == [
        ["all0", "cut", "stage0"],
        ["all0", "cut", "some", "stage1"],
        ["all0", "cut", "some", "stage2"],
    ]
    assert all(all(each.values()) for each in found), found


def save_two_owners(path: str) -> str:
    """Process 0 has a local array where process 1 has an array on the devices of process 2."""
    leaf = jax.numpy.ones(4)
    if jax.process_index() > 0:
        leaf = placed(np.ones(4, np.float32), sharding_of([1], [], [5]))
    try:
        jct.save(path, {"w": leaf})
    except jct.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_processes_that_disagree_on_the_owner_are_refused(tmp_path: Path, job_of: JobOf) -> None:
    for error in job_of(3, 2).call(save_two_owners, str(tmp_path / "c")):
        assert "'state/w'" in error
    assert not (tmp_path / "c").exists()
