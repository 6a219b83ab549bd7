"""Ask trainings on a slow disk to leave, and check that they leave in time.

`python -m tests.nightly.faults.deadline`

Each trial is a real training with a grace period of 1 to 30 s, on a disk that takes up to three times as long for one
save. It must end within the grace period, with its exit code; then the newest step that it knew to be committed, or a
newer one, must be restored, whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxckpt_train.errors import StepNotFoundError
from jaxckpt_train.manager import StepManager
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.fuse_disk import FuseDisk, fuse_disk, why_not
from tests.nightly.faults.needs import leave_if
from tests.support.paths import REPO_ROOT

TRAINING = """
import sys, time
import jax.numpy as jnp
import jaxckpt_train as jct

directory, grace_s, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
grace = None if grace_s == "None" else float(grace_s)
options = {"save_interval_steps": 1, "keep_latest": 2, "if_busy": "skip", "grace_period_s": grace}
with jct.CheckpointCallback(directory, **options) as ckpt:
    state = ckpt.resume({"w": jnp.zeros(mib << 18, jnp.float32)})
    print("resumed", ckpt.completed_steps, flush=True)
    for step in ckpt.steps(10**9):
        state = {"w": state["w"] + 1}
        ckpt(state)
        print("completed", ckpt.latest_step() or 0, flush=True)
        time.sleep(0.02)  # the step
"""
ROOT = REPO_ROOT
EXIT_CODE, MIB = 75, 4
PATIENCE_S = 60.0
SLOWEST_S = 8.0  # for a MiB: one uninterruptible call takes at most an eighth of it


@dataclasses.dataclass
class Found:
    """The result of a campaign: trials, trials whose running save was given up, and problems."""

    trials: int = 0
    given_up: int = 0
    latest_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def training(directory: Path, grace_s: float | None) -> Iterator[subprocess.Popen[str]]:
    """Start a training, and kill it at the end if it has not left."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRAINING, str(directory), str(grace_s), str(MIB)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def trial(
    found: Found, disk: FuseDisk, subject: str, grace_s: float, chance: random.Random, *, knows_grace: bool
) -> None:
    """Run one training; `knows_grace`: whether it knows its grace period."""
    run = disk.path / "run"
    with training(run, grace_s if knows_grace else None) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        for _ in range(chance.randint(1, 30)):
            committed = int(next(lines).split()[1])
        disk.set(per_mib_s=chance.uniform(0, min(3 * grace_s / MIB, SLOWEST_S)))
        for _ in range(chance.randint(1, 10)):
            committed = int(next(lines).split()[1])
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        try:
            rest, errors = process.communicate(timeout=grace_s + PATIENCE_S)
        except subprocess.TimeoutExpired:
            rest, errors = "", "still there"
            disk.set()
        took_s = time.monotonic() - asked
    disk.set()
    committed = max([committed, *(int(line.split()[1]) for line in rest.splitlines())])
    found.trials += 1
    found.given_up += "given up" in errors
    found.latest_s = max(found.latest_s, took_s / grace_s)
    if took_s > grace_s:
        found.problems.append(f"{subject}: left after {took_s:.2f} s, had {grace_s} s")
    if process.returncode != EXIT_CODE:
        found.problems.append(f"{subject}: left with {process.returncode}: {errors[-3000:]}")
    found.problems += [f"{subject}: {problem}" for problem in look(run, committed)]


def look(run: Path, committed: int) -> list[str]:
    """Return the problems that the next owner finds."""
    with StepManager(run) as manager:
        manager.own()
        try:
            array = np.asarray(manager.restore()["state"]["w"])
        except StepNotFoundError:
            return [f"step {committed} was committed, and nothing is there"] if committed else []
        step = manager.restored_step or 0
        problems = [] if (array == step).all() else [f"step {step} is a mixture"]
        if step < committed:
            problems.append(f"restored step {step}, but {committed} was committed")
    left = [name for name in os.listdir(run) if ".tmp-" in name]
    return problems + ([f"left over: {left}"] if left else [])


def campaign(trials: int, seed: int, graces_s: tuple[float, ...], *, knows_grace: bool = True) -> Found:
    """Run `trials` trainings in sequence on one run."""
    found, chance = Found(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, fuse_disk(Path(folder)) as disk:
        for number in range(trials):
            grace_s = chance.choice(graces_s)
            subject = f"seed {seed}, trial {number}, grace {grace_s} s"
            trial(found, disk, subject, grace_s, chance, knows_grace=knows_grace)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    chosen, started = parser.parse_args(), time.monotonic()
    leave_if(why_not())
    found = campaign(chosen.trials, chosen.seed, (1, 1, 1, 2, 2, 3, 5, 10, 30))
    print(f"{found.trials} trials; in {found.given_up} the save under way was given up;", end=" ")
    print(f"the latest left after {found.latest_s:.0%} of its time")
    leave_with(found.problems, started, chosen.seed)


if __name__ == "__main__":
    main()
