"""Cut the power of a real ext4 or xfs during saves: `python -m tests.nightly.faults.power_cut --trials 1000`.

After each cut the file system is mounted again, which replays its journal, and the run is restored: it must return the
newest acknowledged step or a newer one, byte for byte. Half of the cuts come right after an acknowledgement, half at
random. In every other cut the journal reaches the disk without the data, so that names exist without their content.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxckpt_train.checkpointables.base import JsonValue
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.settings import StoreSettings
from tests.nightly.crash.programs import process
from tests.nightly.faults.campaign_end import leave_with, those_that_can
from tests.nightly.faults.loop_disk import Cut, LoopDisk, loop_disk, why_not

When = Literal["acknowledged", "random"]
CUTS: tuple[Cut, ...] = ("nothing flushed", "journal flushed")
MOST_STEPS, LATEST_CUT_S = 12, 0.15


@dataclasses.dataclass
class Found:
    """The result of a campaign: cuts, acknowledged saves, restores of a newer step, and problems."""

    cuts: Counter[Cut] = dataclasses.field(default_factory=Counter)
    acknowledged: int = 0
    newer: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def state_of(step: int) -> dict[str, Any]:
    """Return a state of about 500 kB: arrays that identify the step, and two whose files the steps share."""
    chance = np.random.default_rng(step)
    small = {f"x{n}": chance.integers(0, 99, 7) for n in range(30)}
    shared = {"never": np.arange(10_000.0), "rarely": np.full(1000, step // 4)}
    return {"w": chance.standard_normal(50_000), "small": small, **shared}


def step_of(restored: dict[str, Any]) -> int:
    """Return the step that has all of this content.

    Raises:
        AssertionError: it mixes several steps.
    """
    step = int(restored["data"].value["position"])
    expected = state_of(step)
    for name in ("w", "never", "rarely"):
        assert restored["state"][name].tobytes() == expected[name].tobytes(), f"{name} is not that of step {step}"
    for name, array in expected["small"].items():
        assert restored["state"]["small"][name].tobytes() == array.tobytes(), f"{name} is not that of step {step}"
    return step


def campaign(disk: LoopDisk, trials: int, seed: int, settings: StoreSettings | None = None) -> Found:
    """Cut the power `trials` times; create a new file system after every 20 cuts."""
    found, chance = Found(), random.Random(seed)
    for number in range(trials):
        if number % 20 == 0:
            disk.unmount()
            disk.make_new()
        when: When = chance.choice(("acknowledged", "random"))
        cut = CUTS[number % len(CUTS)]
        subject = f"{disk.kind}, seed {seed}, cut {number} ({when}, {cut})"
        with process(2 * number + 1, 1 + number):
            acknowledged = _save_until_the_cut(found, disk, cut, when, chance, settings, subject)
        disk.unmount()
        disk.mount()
        found.cuts[cut] += 1
        with process(2 * number + 2, 2 + number):  # after a reboot
            _check(found, disk, acknowledged, subject)
    return found


class Timer:
    """Cut the power after a while, on a thread; `join` raises an error of the cut."""

    def __init__(self, disk: LoopDisk, cut: Cut, after_s: float) -> None:
        self._disk, self._kind, self._error = disk, cut, None
        self.is_near = threading.Event()
        self._timer = threading.Timer(after_s, self._cut)

    def start(self) -> None:
        """Start the timer."""
        self._timer.start()

    def _cut(self) -> None:
        self.is_near.set()
        try:
            self._disk.cut_power(self._kind)
        except OSError as error:  # raised by `join`
            self._error = error

    def join(self) -> None:
        """Wait for the cut."""
        self._timer.join()
        if self._error is not None:
            raise RuntimeError(f"the power of {self._disk.path} could not be cut") from self._error


def _save_until_the_cut(
    found: Found,
    disk: LoopDisk,
    cut: Cut,
    when: When,
    chance: random.Random,
    settings: StoreSettings | None,
    subject: str,
) -> int:
    """Save steps until the power is cut; return the last acknowledged one, or 0."""
    acknowledged, steps = 0, chance.randint(1, 4)
    timer = Timer(disk, cut, 0.0 if when == "acknowledged" else chance.uniform(0, LATEST_CUT_S))
    manager = None
    try:
        manager = StepManager(
            disk.path / "run", preservation_policy=LatestN(2), settings=settings, frozen=("never", "rarely")
        )
        acknowledged = manager.latest or 0
        if when == "random":
            steps = MOST_STEPS
            timer.start()
        for _ in range(steps):
            step = acknowledged + 1
            manager.save(step, {"state": state_of(step), "data": JsonValue({"position": step})})
            manager.wait()
            acknowledged = step
            found.acknowledged += 1
    except (CheckpointError, OSError) as error:
        if not timer.is_near.is_set():
            found.problems.append(f"{subject}: {type(error).__name__} before the power was cut: {error}")
    if when == "acknowledged":
        timer.start()
    timer.join()
    if manager is not None:
        with contextlib.suppress(CheckpointError, OSError):
            manager.close()
    del manager
    gc.collect()
    return acknowledged


def _check(found: Found, disk: LoopDisk, acknowledged: int, subject: str) -> None:
    run = disk.path / "run"
    try:
        with StepManager(run) as manager:
            manager.own()
            step = step_of(manager.restore())
            found.newer += step > acknowledged
            if step < acknowledged:
                found.problems.append(f"{subject}: restored step {step}, but {acknowledged} was acknowledged")
            for listed in manager.steps:
                step_of(manager.restore(step=listed))
        left = [name for name in os.listdir(run) if ".tmp-" in name]
        if left:
            found.problems.append(f"{subject}: left over for the next owner: {left}")
    except (StepNotFoundError, CorruptCheckpointError) as error:
        if acknowledged:
            found.problems.append(f"{subject}: step {acknowledged} was acknowledged, but: {error}")
        elif isinstance(error, CorruptCheckpointError):
            found.problems.append(f"{subject}: there is a step that is not whole: {error}")
    except (CheckpointError, OSError, AssertionError) as error:
        found.problems.append(f"{subject}: {type(error).__name__}: {error}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="on each file system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["ext4", "xfs"], choices=["ext4", "xfs"])
    chosen = parser.parse_args()
    logging.getLogger("jaxckpt_train").disabled = True
    problems, started = [], time.monotonic()
    for kind in those_that_can(chosen.kinds, why_not):
        with tempfile.TemporaryDirectory() as folder, loop_disk(Path(folder), kind) as disk:
            found = campaign(disk, chosen.trials, chosen.seed)
        shown = ", ".join(f"{count} {cut}" for cut, count in found.cuts.items())
        print(f"{kind}: {found.cuts.total()} cuts ({shown}) after {found.acknowledged} acknowledged saves,", end=" ")
        print(f"{found.newer} found a newer step than the one that was acknowledged", flush=True)
        problems += [f"{kind}: {problem}" for problem in found.problems]
    leave_with(problems, started, chosen.seed)


if __name__ == "__main__":
    main()
