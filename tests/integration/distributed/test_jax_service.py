"""The coordinator of a single process; JAX's distributed runtime is not used unless it is initialized."""

from __future__ import annotations

from pathlib import Path

from benchmarks.loopback import free_address
from tests.conftest import RunPython

ONE_PROCESS = """
import sys
import jax, jax.numpy as jnp
jax.distributed.initialize(sys.argv[1], num_processes=1, process_id=0)
import jaxckpt_train as jct
with jct.StepManager(sys.argv[2]) as manager:
    manager.save(1, {"state": jnp.arange(3)})
print(manager.restore()["state"].tolist())
"""
NEVER_INITIALISED = """
import sys
import jax, jax.numpy as jnp
import jaxckpt_train as jct
with jct.CheckpointCallback(sys.argv[1], save_interval_steps=1) as ckpt:
    state = ckpt.resume({"w": jnp.zeros(3)})
    for step in ckpt.steps(2):
        ckpt(state)
print(jax.distributed.is_initialized(), ckpt.latest_step())
"""


def test_jax_distributed_is_never_initialised(tmp_path: Path, run_python: RunPython) -> None:
    assert run_python(NEVER_INITIALISED, tmp_path / "run", check=True).stdout == "False 2\n"


def test_a_distributed_job_of_one_process_saves(tmp_path: Path, run_python: RunPython) -> None:
    done = run_python(ONE_PROCESS, free_address(), tmp_path / "run", check=True)
    assert done.stdout == "[0, 1, 2]\n"
