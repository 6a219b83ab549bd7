"""A training loop whose run is on an object store: exact resumes, shutdowns, errors, and a storage that is silent."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.settings import ObjectStoreSettings
from tests.conftest import RunPython
from tests.support.objects.faults import Silent
from tests.support.objects.stand_in import StandIn
from tests.support.paths import REPO_ROOT
from tests.support.warm_python import WarmProcess

TRAINING = """
import hashlib, json, os, signal, sys
import grain, jax, jax.numpy as jnp, numpy as np
from flax import nnx
import jaxckpt_train as jct

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
    def __call__(self, x):
        return self.dropout(self.layer(x))

@nnx.jit
def update(model, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    return loss

directory, stop_at, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = Model(nnx.Rngs(0, dropout=1))
rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
data = iter(grain.MapDataset.source(rows).shuffle(seed=1).repeat().batch(8).to_iter_dataset())
losses = []
try:
    with jct.CheckpointCallback(directory, progress=False, **options) as ckpt:
        model, data = ckpt.resume(model, data)
        for step in ckpt.steps(12):
            losses.append(float(update(model, next(data))))
            if step + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt(metrics={"loss": losses[-1]})
finally:
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    print(json.dumps({"losses": losses, "digest": digest}))
"""
OPTIONS = {"save_interval_steps": 2, "keep_latest": 2, "keep_best": 1, "best_metric": "loss", "best_link": True}


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_preempted_training_continues_exactly(cloud: StandIn, run_python: RunPython) -> None:
    options = json.dumps(OPTIONS)
    straight = result_of(run_python(TRAINING, cloud.url("straight"), "0", options, check=True))
    first = run_python(TRAINING, cloud.url("run"), "7", options)
    assert first.returncode == 75, first.stderr
    assert jct.StepManager(cloud.url("run")).latest == 7
    second = result_of(run_python(TRAINING, cloud.url("run"), "0", options, check=True))
    assert result_of(first)["losses"] + second["losses"] == straight["losses"]
    assert second["digest"] == straight["digest"]

    manager = jct.StepManager(cloud.url("run"))
    saved = {step: straight["losses"][step - 1] for step in (2, 4, 6, 7, 8, 10, 12)}
    best = min(saved, key=lambda step: saved[step])
    assert manager.steps == sorted({best, 10, 12})
    assert jct.metadata(cloud.url("run/best")).step == best
    events = [event["event"] for event in manager.history.events()]
    assert events.count("preempted") == 1
    assert events[-1] == "end"


def test_pinned_step_survives_later_loops(cloud: StandIn) -> None:
    directory, state = cloud.url("run"), {"w": np.zeros(3)}
    for stop in (3, 6):
        with jct.CheckpointCallback(directory, save_interval_steps=1, keep_latest=1, progress=False) as ckpt:
            state = ckpt.resume(state)
            for step in ckpt.steps(stop):
                state = {"w": state["w"] + 1}
                ckpt(state)
                if step == 0:
                    ckpt.wait()
                    ckpt.manager.pin(1)
    assert jct.StepManager(directory).steps == [1, 6]


def test_error_in_loop_saves_the_last_update(cloud: StandIn) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        jct.CheckpointCallback(cloud.url("run"), save_interval_steps=100, save_on_error=True, progress=False) as ckpt,
    ):
        state = ckpt.resume({"w": np.zeros(3)})
        for step in ckpt.steps(10):
            state = {"w": state["w"] + 1}
            ckpt(state)
            if step == 4:
                raise ZeroDivisionError
    assert jct.load(jct.StepManager(cloud.url("run")).path())["w"].tolist() == [5.0, 5.0, 5.0]


def test_new_run_starts_from_best_step_of_another(cloud: StandIn) -> None:
    with jct.StepManager(cloud.url("old"), best_link=jct.BestLink("loss")) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, {"state": {"w": np.full(3, float(step))}}, metrics={"loss": loss})
            manager.wait()
    options: dict[str, Any] = {"save_interval_steps": 1, "init_from": cloud.url("old/best"), "progress": False}
    with jct.CheckpointCallback(cloud.url("new"), **options) as ckpt:
        assert ckpt.resume({"w": np.zeros(3)})["w"].tolist() == [2.0, 2.0, 2.0]
        assert ckpt.completed_steps == 0


def test_loop_goes_on_while_the_endpoint_is_silent(cloud: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    quick = ObjectStoreSettings(request_timeout_s=4.0, retries=1, retry_timeout_s=1.0)
    store, stall_s = jct.StoreSettings(object_store=quick), 1.0
    ckpt = jct.CheckpointCallback(
        cloud.url("run"), save_interval_steps=1, store=store, stall_timeout_s=stall_s, progress=False
    )
    state = ckpt.resume({"w": np.zeros(3)})
    ckpt(state)
    ckpt.wait()
    cloud.faults, started = Silent(), time.monotonic()
    with caplog.at_level(logging.WARNING):
        ckpt({"w": state["w"] + 1})
        result = ckpt({"w": state["w"] + 2})
    assert not result.saved
    assert "no progress" in result.reason
    assert time.monotonic() - started < stall_s + 10.0
    assert any("step 3 is skipped" in record.message for record in caplog.records)
    with pytest.raises(jct.StorageError, match="cannot"):
        ckpt.close()
    assert time.monotonic() - started < 60.0
    cloud.faults = None
    with jct.StepManager(cloud.url("run")) as manager:
        manager.restore({"state": {"w": np.zeros(3)}})
        assert manager.restored_step == 1


INTERRUPTED = """
import sys
import numpy as np
import jaxckpt_train as jct
try:
    jct.load(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_interrupt_ends_a_request_without_answer(cloud: StandIn) -> None:
    cloud.faults = Silent()
    process = WarmProcess(["-c", INTERRUPTED, cloud.url("there")], {**os.environ, "PYTHONPATH": str(REPO_ROOT)})
    pause, until = threading.Event(), time.monotonic() + 60
    while not cloud.requests and time.monotonic() < until:
        pause.wait(0.05)
    process.send_signal(signal.SIGINT)
    with process.stdin, process.stdout, process.stderr:
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(60) == 0


CHILD = """
import multiprocessing, sys
import numpy as np
import jaxckpt_train as jct

def load(url):
    try:
        print(jct.load(url)["w"].tolist(), flush=True)
    except jct.StorageError as error:
        print(error, flush=True)

if __name__ == "__main__":
    jct.save(sys.argv[1], {"w": np.arange(3)})
    child = multiprocessing.get_context(sys.argv[2]).Process(target=load, args=(sys.argv[1],))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("way", "expected"),
    [("fork", 'get_context("spawn")'), pytest.param("spawn", "[0, 1, 2]", marks=pytest.mark.nightly)],
)
def test_child_of_process_that_used_the_storage(
    cloud: StandIn, run_python: RunPython, tmp_path: Path, way: str, expected: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    done = run_python(program, cloud.url("there"), way, check=True)
    assert expected in done.stdout
