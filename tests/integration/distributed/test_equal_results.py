"""Runs of jobs where one process is slower, or makes calls that the others do not make: the results are equal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.jobs.arrays import global_array
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.small_runs import QUICK, SAVED, is_first, outcome, save, save_steps, state_of


class Slower(LocalBackend):
    """A disk that is slower in process 1, but always makes progress."""

    def create(self, path: str, *, direct: Any) -> Any:
        if not is_first() and path.endswith(".safetensors"):
            time.sleep(0.3)
        return super().create(path, direct=direct)


def save_where_one_is_slower(directory: str) -> list[str]:
    settings = jct.StoreSettings(
        segment_bytes=1 << 20, io_threads=1, barrier_timeout_s=8.0
    )  # progress is reported each second
    manager = jct.StepManager(directory, backend=Slower(), stall_timeout_s=2.0, settings=settings)
    state = {str(number): global_array([512, 1024], [2], ["x"]) for number in range(20)}
    found = [outcome(lambda step=step: manager.save(step, {"state": state}).saved) for step in (1, 2)]  # type: ignore[misc]
    return [*found, outcome(manager.close)]


def test_slower_save_of_one_is_not_stalled(tmp_path: Path) -> None:
    with running(2) as job:
        assert job.call(save_where_one_is_slower, str(tmp_path / "run")) == [["True", "True", "None"]] * 2


def two_callbacks(first: str, second: str) -> list[int]:
    callbacks = {
        number: jct.CheckpointCallback(directory, on_preemption="raise", save_interval_steps=100_000)
        for number, directory in enumerate((first, second))
    }
    states = [callbacks[number].resume(state_of(number)) for number in (0, 1)]
    left = []
    for step in range(3000):
        for number, callback in list(callbacks.items()):
            try:
                callback(states[number])
            except jct.Preempted:
                left.append(number)
                del callbacks[number]
        if not callbacks:
            break
        if step == 50 and not is_first():
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)
    return sorted(left)


def test_two_callbacks_of_loop_both_get_preemption(tmp_path: Path) -> None:
    with running(2) as job:
        assert job.call(two_callbacks, str(tmp_path / "one"), str(tmp_path / "two")) == [[0, 1]] * 2


def part_of(n: int, i: int) -> Any:
    """An iterator of a contiguous shard of the records."""
    import grain

    records = grain.MapDataset.range(96)[i * 96 // n : (i + 1) * 96 // n]
    return iter(records.batch(4).to_iter_dataset(grain.ReadOptions(num_threads=0)))


def save_part(directory: str) -> list[int]:
    data = part_of(jax.process_count(), jax.process_index())
    seen = [int(record) for _ in range(3) for record in next(data)]
    with jct.StepManager(directory) as manager:
        manager.save(3, {"state": state_of(1), "data": data})
    return seen


def test_contiguous_shards_need_same_process_count(tmp_path: Path, job_of: JobOf) -> None:
    seen = job_of(2, 1).call(save_part, str(tmp_path / "run"))
    assert seen == [list(range(12)), list(range(48, 60))]
    data = part_of(1, 0)
    with pytest.raises(jct.IteratorStateError):
        jct.load_checkpointables(tmp_path / "run" / "step-0000000003", {"data": data})


def test_missing_per_process_value_is_requested(tmp_path: Path) -> None:
    """A value that does not change in place must be given at each call, or each step saves its first value."""
    generator = np.random.default_rng(1)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1, save_on_exit=False) as ckpt:
        state, _ = ckpt.resume({"w": np.zeros(3)}, rng=jct.PerProcess(generator.bit_generator.state))
        generator.random(5)
        with pytest.raises(jct.SettingsError, match="rng"):
            ckpt(state)


def note_in_one(directory: str) -> list[str]:
    manager = jct.StepManager(directory, settings=QUICK)
    found = [save(manager, 1)]
    manager.wait()
    if is_first():
        manager.attach_metrics(1, {"eval": 0.5})
    return [*found, save(manager, 2), outcome(lambda: manager.is_saved(2)), outcome(lambda: manager.restore(step=9))]


def test_extra_call_of_one_process_mixes_nothing(tmp_path: Path) -> None:
    with running(2) as job:
        answers = job.call(note_in_one, str(tmp_path / "run"))
    assert answers[0][2] == answers[1][2] or "OtherProcessError" in str(answers)
    assert "ValidationError" not in str(answers)


def attach_what_each_has(directory: str) -> list[str]:
    manager = jct.StepManager(directory, settings=QUICK)
    found = [save(manager, 1)]
    manager.wait()
    metrics: Any = {"eval": None if is_first() else 1.0}  # those of process 0 count
    found += [outcome(lambda: manager.attach_metrics(1, metrics))[:13], save(manager, 2)]
    return [*found, outcome(manager.close)]


def test_failed_attach_of_one_reaches_all(tmp_path: Path) -> None:
    with running(2) as job:
        answers = job.call(attach_what_each_has, str(tmp_path / "run"))
    assert answers == [[SAVED, "SettingsError", SAVED, "None"]] * 2


def undeleted_keys(directory: str) -> int:
    save_steps(directory, list(range(1, 40)))
    save_steps(f"{directory}-2", [1])
    coordinator: Any = current()
    return len(coordinator._nested._undeleted)


def test_finished_saves_leave_nothing_in_coordinator(tmp_path: Path) -> None:
    with running(2) as job:
        assert max(job.call(undeleted_keys, str(tmp_path / "run"))) < 10
