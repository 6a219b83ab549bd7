"""Jobs of several processes that save to an object store: states, runs, bytes that a load reads, and a kill."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, values_of
from tests.support.jobs.counted_loads import WAYS, Arrays, patterned, save_alone, size_of
from tests.support.jobs.job import Job, running
from tests.support.objects.faults import KillAt
from tests.support.objects.stand_in import StandIn

SHAPES: dict[str, list[Any]] = {
    "rows": [[64, 1024], [4], ["x"]],
    "columns": [[8, 12], [4], [None, "x"]],
    "replicated": [[1024, 1024], [4], []],
    "odd": [[1021, 31], [4], []],
    "scalar": [[], [4], []],
}


@pytest.fixture(scope="module")
def job(shared_cloud: StandIn) -> Iterator[Job]:
    with running(4) as started:
        yield started


def tree(step: int) -> dict[str, jax.Array]:
    return {name: global_array(*each) + step for name, each in SHAPES.items()}


def target() -> dict[str, jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), tree(0))


def wrong_leaves(found: dict[str, jax.Array], step: int) -> list[str]:
    expected = tree(step)
    return [
        name
        for name in SHAPES
        if any(
            np.asarray(mine.data).tobytes() != np.asarray(its.data).tobytes()
            for mine, its in zip(found[name].addressable_shards, expected[name].addressable_shards, strict=True)
        )
    ]


def save_and_load(path: str) -> list[str]:
    jct.save(path, tree(1))
    jct.save(path, tree(2), overwrite=True)
    return wrong_leaves(jct.load(path, target()), 2)


def test_checkpoint_is_saved_by_all_and_loaded_by_one(shared_cloud: StandIn, job: Job) -> None:
    path = shared_cloud.url("single")
    assert job.call(save_and_load, path) == [[]] * 4
    loaded = jct.load(path)
    for name, (shape, *_) in SHAPES.items():
        assert loaded[name].tobytes() == (values_of(shape) + np.float32(2)).tobytes()
    assert jct.verify(path).ok
    files = {key.rpartition("/")[2] for key in shared_cloud.objects.content if key.startswith("bucket/single/data-")}
    assert {f"p{process:05d}-s000.safetensors" for process in range(4)} <= files


def train_run(run: str) -> dict[str, Any]:
    """Save steps with retention, pins and metrics; return what this process lists."""
    with jct.StepManager(run, preservation_policy=jct.LatestN(2)) as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(step, {"state": tree(step)}, metrics={"loss": float(step)})
            manager.wait()
            if step == 2:
                manager.pin(2)
        manager.attach_metrics(4, {"accuracy": 0.5})
        return {"steps": manager.steps, "metrics": dict(manager.infos[-2].metrics or {})}


def resume_run(run: str) -> list[Any]:
    with jct.StepManager(run) as manager:
        found = manager.restore({"state": target()})
        wrong = wrong_leaves(found["state"], manager.restored_step or 0)
        manager.save(9, {"state": tree(9)})
        manager.wait()
        return [manager.restored_step, wrong, manager.steps]


def test_run_is_saved_and_resumed_by_all_processes(shared_cloud: StandIn, job: Job) -> None:
    run = shared_cloud.url("run")
    expected = {"steps": [2, 4, 5], "metrics": {"loss": 4.0, "accuracy": 0.5}}
    assert job.call(train_run, run) == [expected] * 4
    assert job.call(resume_run, run) == [[5, [], [2, 4, 5, 9]]] * 4
    with jct.StepManager(run) as manager:
        assert manager.steps == [2, 4, 5, 9]
        restored = manager.restore({"state": None})["state"]
    assert restored["replicated"].tobytes() == (values_of([1024, 1024]) + np.float32(9)).tobytes()


REPLICATED: Arrays = {"w": ([1031, 4096], "float32"), "long": ([5 << 20], "uint8"), "b": ([77], "float32")}
REPLICATED_SPECS: dict[str, list[Any]] = {name: [] for name in REPLICATED}


def bytes_read(shared_cloud: StandIn, start: int) -> int:
    """The bytes of the bodies of all reads since a request."""
    total = 0
    for request in shared_cloud.requests[start:]:
        stored = shared_cloud.objects.get(f"bucket/{request.key}") if request.kind == "get" else None
        if stored is not None and request.status in (200, 206):
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
            total += len(stored.data) if span is None else min(int(span[2]) + 1, len(stored.data)) - int(span[1])
    return total


@pytest.mark.parametrize("load", WAYS)
def test_replicated_state_is_read_once_by_the_job(shared_cloud: StandIn, job: Job, load: Any) -> None:
    path = shared_cloud.url("whole")
    if shared_cloud.objects.get("bucket/whole/COMMIT") is None:
        save_alone(path, REPLICATED)
    start = len(shared_cloud.requests)
    answers = job.call(load, path, [4, 1], REPLICATED_SPECS, REPLICATED, True)
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert bytes_read(shared_cloud, start) <= 1.05 * size_of(REPLICATED)


def restore_replicated(run: str) -> bool:
    settings = jct.StoreSettings(read_once=True)
    with jct.StepManager(run, settings=settings) as manager:
        want = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), large())
        found = manager.restore({"state": want})["state"]
        return all(np.asarray(s.data).tobytes() == patterned(*LARGE).tobytes() for s in found["w"].addressable_shards)


LARGE: tuple[list[int], str] = ([2048, 2048], "float32")


def large() -> dict[str, jax.Array]:
    return {"w": global_array(LARGE[0], [4], [])}


def test_restore_of_a_run_reads_replicated_state_once(shared_cloud: StandIn, job: Job) -> None:
    run, values = shared_cloud.url("large"), patterned(*LARGE)
    with jct.StepManager(run) as manager:
        manager.save(1, {"state": {"w": values}})
        manager.wait()
    start = len(shared_cloud.requests)
    assert job.call(restore_replicated, run) == [True] * 4
    assert bytes_read(shared_cloud, start) <= 1.05 * values.nbytes


def save_steps(run: str, steps: list[int]) -> list[int]:
    with jct.StepManager(run, settings=jct.StoreSettings(barrier_timeout_s=5.0)) as manager:
        for step in steps:
            manager.save(step, {"state": {"w": global_array([64, 1024], [2], ["x"]) + step}})
            manager.wait()
        return manager.steps


def load_step(run: str) -> list[Any]:
    want = {"w": jax.ShapeDtypeStruct((64, 1024), np.float32, sharding=global_array([64, 1024], [4], ["x"]).sharding)}
    with jct.StepManager(run) as manager:
        found = manager.restore({"state": want})["state"]["w"]
        step = manager.restored_step or 0
        expected = values_of([64, 1024]) + np.float32(step)
        right = all(np.asarray(s.data).tobytes() == expected[s.index].tobytes() for s in found.addressable_shards)
        manager.save(step + 1, {"state": {"w": found + 1}})
        manager.wait()
        return [step, right, manager.steps]


def test_fresh_job_of_another_size_resumes_after_a_kill(shared_cloud: StandIn, job: Job) -> None:
    run = shared_cloud.url("killed")
    with running(2) as small:
        small.call(save_steps, run, [1, 2])
        shared_cloud.faults = KillAt(small.workers[1].process.pid, r"killed/step-0000000003.*/p00001")
        try:
            ended = small.outcomes(save_steps, run, [3], timeout_s=60.0)
        finally:
            shared_cloud.faults = None
    assert all("error" in each for each in ended)
    assert job.call(load_step, run) == [[2, True, [1, 2, 3]]] * 4


def save_elsewhere(path: str, endpoint: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 2:
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
        try:
            jct.save(path, tree(1))
        except jct.CheckpointError as error:
            return str(error)
    return "saved"


def test_process_that_reaches_another_store_fails_the_save(shared_cloud: StandIn, job: Job) -> None:
    with StandIn() as other:
        answers = job.call(save_elsewhere, shared_cloud.url("apart"), other.endpoint)
    assert all("process 0 does not see it" in answer for answer in answers)
    assert shared_cloud.objects.get("bucket/apart/COMMIT") is None
