"""How many requests a run on an object store makes: to save a step, and to resume from the newest of many."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.run.record import RunRecord, decode_record, encode_record
from tests.support.objects.stand_in import StandIn

STEPS = 1000


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(1000.0) + step}


def run_of_many_steps(cloud: StandIn) -> str:
    """Save two steps, and record 998 more before them, whose objects nobody needs."""
    directory = cloud.url("run")
    with jct.StepManager(directory) as manager:
        for step in (STEPS - 1, STEPS):
            manager.save(step, {"state": state(step)})
            manager.wait()
    stored = cloud.objects.get("bucket/run/record.json")
    assert stored is not None
    header, _, content = stored.data.partition(b"\n")
    record = decode_record(content, "record")
    steps = dict(record.steps or {})
    info = min(steps.values(), key=lambda each: each["sequence"])
    for step in range(1, STEPS - 1):
        steps[f"step-{step:010d}.{step:016x}"] = {**info, "sequence": step - STEPS}
    cloud.objects.put("bucket/run/record.json", header + b"\n" + encode_record(with_steps(record, steps)))
    return directory


def with_steps(record: RunRecord, steps: dict[str, dict[str, Any]]) -> RunRecord:
    return msgspec.structs.replace(record, steps=steps)


def kinds_since(cloud: StandIn, start: int) -> list[str]:
    return [request.kind for request in cloud.requests[start:]]


def test_save_of_1000_small_arrays_takes_six_requests(cloud: StandIn) -> None:
    arrays, others = ({f"w{number}": np.full(500, number + n, np.float32) for number in range(1000)} for n in (0, 1))
    with jct.StepManager(cloud.url("run")) as manager:
        manager.save(1, {"state": arrays})
        manager.wait()
        start = len(cloud.requests)
        manager.save(2, {"state": others}, metrics={"loss": 0.5})
        manager.wait()
        kinds = kinds_since(cloud, start)
    assert sorted(kinds) == ["get", "put_create", "put_create", "put_create", "put_create", "put_update"]


def test_restore_from_newest_of_1000_steps_takes_four_requests(cloud: StandIn) -> None:
    directory = run_of_many_steps(cloud)
    start = len(cloud.requests)
    with jct.StepManager(directory) as manager:
        restored = manager.restore({"state": state(0)})
        assert kinds_since(cloud, start) == ["get"] * 4
        assert len(manager.steps) == STEPS
    assert manager.restored_step == STEPS
    assert restored["state"]["w"].tobytes() == state(STEPS)["w"].tobytes()


def test_resume_of_loop_adds_four_requests_to_own_the_run(cloud: StandIn) -> None:
    directory = run_of_many_steps(cloud)
    start = len(cloud.requests)
    with jct.CheckpointCallback(directory, save_interval_steps=10, progress=False) as ckpt:
        resumed = ckpt.resume(state(0))
        kinds = kinds_since(cloud, start)
        assert ckpt.completed_steps == STEPS
    owning = ["get", "get", "put_update", "put_update"]  # is it a run?, the lock, the new lock, the new record
    reading = ["get"] * 4  # the record, COMMIT, the manifest, the arrays
    assert sorted(kinds) == sorted([*owning, *reading, "put_create"])  # the last is in the history
    assert resumed["w"].tobytes() == state(STEPS)["w"].tobytes()


def test_first_save_after_resume_does_not_read_the_history(cloud: StandIn) -> None:
    directory = run_of_many_steps(cloud)
    with jct.CheckpointCallback(directory, save_interval_steps=1, progress=False) as ckpt:
        ckpt.resume(state(0))
        start = len(cloud.requests)
        ckpt(state(STEPS + 1), step=STEPS + 1)
        ckpt.wait()
        assert "list" not in kinds_since(cloud, start)
