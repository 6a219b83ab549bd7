"""Larger jobs on an object store: eight processes save in parallel, and any process is killed during a save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, values_of
from tests.support.jobs.job import running
from tests.support.objects.faults import KillAt
from tests.support.objects.stand_in import StandIn

ROWS, WIDTH, ARRAYS = 8192, 1024, 8  # 256 MiB


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A server that the variables of the environment name, here and in the processes of the jobs."""
    with StandIn() as started, started.named():
        yield started


def save_large(path: str, rows: int) -> int:
    tree = {f"w{number}": global_array([rows, WIDTH], [8], ["x"]) + number for number in range(ARRAYS)}
    return jct.save(path, tree).bytes


def test_eight_processes_save_in_parallel(server: StandIn) -> None:
    with running(8) as job:
        answers = job.call(save_large, server.url("large"), ROWS, timeout_s=600.0)
    assert min(answers) == max(answers) >= ARRAYS * ROWS * WIDTH * 4
    loaded = jct.load(server.url("large"))
    for number in range(ARRAYS):
        assert loaded[f"w{number}"].tobytes() == (values_of([ROWS, WIDTH]) + np.float32(number)).tobytes()


def save_steps(run: str, steps: list[int]) -> list[int]:
    with jct.StepManager(run, settings=jct.StoreSettings(barrier_timeout_s=5.0)) as manager:
        for step in steps:
            manager.save(step, {"state": {"w": global_array([64, 1024], [3], [], "float32") + step}})
            manager.wait()
        return manager.steps


def continue_run(run: str) -> list[Any]:
    sharding = global_array([64, 1024], [2], ["x"]).sharding
    want = {"w": jax.ShapeDtypeStruct((64, 1024), np.float32, sharding=sharding)}
    with jct.StepManager(run) as manager:
        found = manager.restore({"state": want})["state"]["w"]
        step = manager.restored_step or 0
        expected = values_of([64, 1024]) + np.float32(step)
        right = all(np.asarray(s.data).tobytes() == expected[s.index].tobytes() for s in found.addressable_shards)
        manager.save(step + 1, {"state": {"w": found + 1}})
        manager.wait()
        return [step, right, manager.steps]


@pytest.mark.parametrize("process", [0, 1, 2])
@pytest.mark.parametrize("pattern", [r"step-0000000003.*/p00000", r"step-0000000003.*/COMMIT", r"record\.json"])
def test_smaller_job_continues_after_a_kill(server: StandIn, process: int, pattern: str) -> None:
    run = server.url("run")
    with running(3) as job:
        job.call(save_steps, run, [1, 2])
        job.call(save_steps, run, [])
        server.faults = KillAt(job.workers[process].process.pid, pattern, "PUT")
        job.outcomes(save_steps, run, [3], timeout_s=60.0)
        server.faults = None
    found = jct.StepManager(run).steps
    assert found in ([1, 2], [1, 2, 3])
    with running(2) as smaller:
        answers = smaller.call(continue_run, run)
    assert answers == [[found[-1], True, [*found, found[-1] + 1]]] * 2
