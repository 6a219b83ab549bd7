"""In a job, each process takes over the files that it wrote itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, values_of
from tests.support.jobs.job import Job, running

ROWS, WIDTH = 64, 8192  # 2 MiB


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with running(2) as started:
        yield started


def state_of(base: jax.Array, count: int, step: int) -> dict[str, jax.Array]:
    return {"base": base, "whole": global_array([ROWS], [count], []), "w": global_array([ROWS], [count], ["x"]) + step}


def save_steps(directory: str, first: int, last: int, count: int, index_files: bool = False) -> list[int]:
    """Resume, save some steps, and return the bytes that each took over."""
    taken, settings = [], jct.StoreSettings(index_files=index_files)
    with jct.StepManager(directory, frozen=["base", "whole"], settings=settings) as manager:
        base = global_array([ROWS, WIDTH], [count], ["x"])
        if manager.latest is not None:
            base = manager.restore({"state": state_of(base, count, 0)})["state"]["base"]
        for step in range(first, last):
            manager.save(step, {"state": state_of(base, count, step)})
            manager.wait()
        if jax.process_index() == 0:
            taken = [event["taken_bytes"] for event in manager.history.events() if event["event"] == "save"]
    return taken


def check(directory: Path, last: int) -> None:
    manager = jct.StepManager(directory)
    for step in range(1, last):
        assert jct.verify(manager.path(step)).ok
        found = manager.load({"state": None}, step)["state"]
        assert np.asarray(found["base"]).tobytes() == values_of([ROWS, WIDTH]).tobytes()
        assert np.asarray(found["w"]).tobytes() == (values_of([ROWS]) + np.float32(step)).tobytes()


@pytest.mark.parametrize("index_files", [False, True])
def test_processes_take_over_their_own_files(job: Job, tmp_path: Path, index_files: bool) -> None:
    taken = job.call(save_steps, str(tmp_path), 1, 4, 2, index_files)[0]
    assert taken[0] == 0
    assert all(each > ROWS * WIDTH * 4 for each in taken[1:])
    taken = job.call(save_steps, str(tmp_path), 4, 6, 2, index_files)[0]
    assert all(each > ROWS * WIDTH * 4 for each in taken[3:])
    check(tmp_path, 6)


def test_other_number_of_processes_writes_anew(job: Job, tmp_path: Path) -> None:
    job.call(save_steps, str(tmp_path), 1, 3, 2)
    with running(4) as larger:
        taken = larger.call(save_steps, str(tmp_path), 3, 5, 4)[0]
    assert taken[2] == 0
    assert taken[3] > ROWS * WIDTH * 4
    check(tmp_path, 5)
