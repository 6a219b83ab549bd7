"""Signals to the whole process group, as schedulers send them: worker processes of the loop die of them, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.conftest import REPO_ROOT
from tests.support.tiers import nightly_after

pytestmark = pytest.mark.timeout(180)

# Each loop waits for a worker process without end in update 3; the next batch shows the position in the data.
HEAD = """
import concurrent.futures, functools, multiprocessing, sys, time
import grain
import numpy as np

def hang(*_):
    time.sleep(600)

def dataset(hangs):
    return grain.MapDataset.range(100).map(functools.partial(hangs_at, hangs)).batch(2)

def hangs_at(hangs, number, first=6):
    if hangs and number >= first:
        time.sleep(600)
    return number

class Hangs(grain.transforms.Map):
    def __init__(self, hangs):
        self.hangs = hangs
    def map(self, number):
        return hangs_at(self.hangs, number, 3)

def grain_dataset(hangs):
    options = grain.MultiprocessingOptions(num_workers=1)
    return iter(dataset(hangs).to_iter_dataset().mp_prefetch(options))

def grain_loader(hangs):
    sampler = grain.samplers.SequentialSampler(100, grain.sharding.NoSharding())
    operations = [Hangs(hangs)]
    source = grain.sources.RangeDataSource(0, 100, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=1))

def in_process(hangs):
    return iter(dataset(False).to_iter_dataset())
"""
TRAIN = """
def wait_for_pool(step):
    if step == 3:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(sys.argv[3])) as pool:
            pool.submit(abs, 1).result()
            waits()
            pool.submit(hang).result()

def wait_for_worker(step):
    if step == 3:
        worker = multiprocessing.get_context(sys.argv[3]).Process(target=hang, daemon=True)
        worker.start()
        waits()
        worker.join()
        raise RuntimeError(f"worker ended with {worker.exitcode}")

def waits():
    print("waits", flush=True)

def main():
    import jaxckpt_train as jct
    _, run, make, method, update, *signals = sys.argv
    options = {"signals": signals} if signals else {}
    with jct.CheckpointCallback(run, save_interval_steps=1000, grace_period_s=60, **options) as ckpt:
        state, data = ckpt.resume({"sum": np.zeros(())}, globals()[make](True))
        for step in ckpt.steps(50):
            if step == 3 and not update:
                waits()
            batch = next(data)
            if update:
                globals()[update](step)
            state = {"sum": state["sum"] + np.sum(batch)}
            ckpt(state)

if __name__ == "__main__":
    main()
"""


REST = """
import jaxckpt_train as jct
if __name__ == "__main__":
    data = {"grain_dataset": grain_dataset, "grain_loader": grain_loader, "in_process": in_process}[sys.argv[2]](False)
    restored = jct.StepManager(sys.argv[1]).restore({"state": {"sum": np.zeros(())}, "data": data})
    print(int(restored["state"]["sum"]), np.asarray(next(data)).tolist(), flush=True)
"""


@pytest.mark.parametrize(
    ("make", "method", "update", "name"),
    nightly_after(
        1,
        [
            ("grain_dataset", "", "", "SIGTERM"),
            ("grain_loader", "", "", "SIGUSR1"),
            ("in_process", "fork", "wait_for_pool", "SIGUSR2"),
            ("in_process", "spawn", "wait_for_worker", "SIGINT"),
        ],
    ),
)
def test_death_of_workers_keeps_shutdown_request(
    tmp_path: Path, make: str, method: str, update: str, name: str
) -> None:
    pytest.importorskip("grain")
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(HEAD + TRAIN)
    variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", str(script), str(run), make, method, update]
    pipe: Any = subprocess.PIPE
    signals = [name] if name == "SIGINT" else []
    with subprocess.Popen(
        command + signals, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == "waits\n"
            os.killpg(job.pid, signal.Signals[name])
            errors = job.communicate(timeout=90)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # with any workers that the job left
    assert job.returncode == 75, errors
    assert "Traceback" in errors  # of the loop's error
    manager = jct.StepManager(run)
    assert manager.steps == [3]
    rest = tmp_path / "rest.py"
    rest.write_text(HEAD + REST)
    again = [sys.executable, "-W", "ignore", str(rest), str(run), make]
    done = subprocess.run(again, env=variables, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == ("3 3\n" if make == "grain_loader" else "15 [6, 7]\n"), done.stderr
