"""Kill saving processes at random moments, with SIGKILL.

`python -m tests.nightly.faults.random_kills --kills 5000`

Each life is a real, forked process: it takes over the run, restores, saves steps and pins some until it is killed. It
reports acknowledged steps; the next life must find the newest of these, or a newer step, whole, and no leftovers.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.errors import StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.known_states import KEPT, SETTINGS, checkpointables_of, token_in
from tests.support.forking import LONGEST_S, Tell, Work, ended, started

LIVES = 40
LONGEST_LIFE_S = 0.25
LONGER, SHORTER = 1.1, 0.95


@dataclasses.dataclass
class Found:
    """The result of a campaign: kills, acknowledged saves, kills by activity of the process, and problems."""

    kills: int = 0
    acknowledged: int = 0
    during: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


def live(directory: Path, newest: int, seed: int, tell: Tell) -> None:
    """Run one process, which reports problems and acknowledged steps."""
    chance = random.Random(seed)
    with StepManager(directory, preservation_policy=LatestN(KEPT), settings=SETTINGS) as manager:
        tell("owning", None)
        manager.own()
        manager._run._deleter.wait(LONGEST_S)
        harmless = (*TEMPORARY_PREFIXES, LOCK_NAME)
        left = [name for name in os.listdir(directory) if name.startswith(".") and not name.startswith(harmless)]
        if left:
            tell("problem", f"left over: {left}")
        tell("restoring", None)
        try:
            step = token_in(manager.restore())
        except StepNotFoundError:
            step = 0
        if step < newest:
            tell("problem", f"restored step {step}, but {newest} was acknowledged")
        for listed in manager.steps:
            if token_in(manager.restore(step=listed)) != listed:
                tell("problem", f"step {listed} holds another")
        manager.restore() if step else None
        while True:
            step += 1
            tell("saving", step)
            manager.save(step, checkpointables_of(step))
            if chance.random() < 0.7:
                manager.wait(LONGEST_S)
                tell("acknowledged", step)
            if chance.random() < 0.1:
                manager.pin(step, pinned=chance.random() < 0.5) if step in manager.steps else None


def killed(work: Work, after_s: float) -> list[tuple[str, Any]]:
    """Run a function in a forked process that is killed after a time; return its events."""
    child = started(work)
    time.sleep(after_s)
    os.kill(child.process, signal.SIGKILL)
    lines, status = ended(child)
    if status != -signal.SIGKILL:
        lines.append(("problem", f"it ended by itself, with status {status}"))
    return lines


def campaign(kills: int, seed: int, folder: Path) -> Found:
    """Run and kill processes; `LIVES` of them share a run, and they live longer on a slow machine."""
    found, newest, longest_s = Found(), 0, LONGEST_LIFE_S
    directory = folder / "run"
    for number in range(kills):
        if number % LIVES == 0:
            shutil.rmtree(directory, ignore_errors=True)
            newest = 0
        life = random.Random(f"{seed} {number}")
        work = functools.partial(live, directory, newest, life.randrange(1 << 30))
        events = killed(work, life.uniform(0, longest_s))
        has_saved = any(what == "saving" for what, _ in events)
        longest_s = max(LONGEST_LIFE_S, longest_s * (SHORTER if has_saved else LONGER))
        found.kills += 1
        found.during[events[-1][0] if events else "starting"] += 1
        for what, value in events:
            if what == "acknowledged":
                found.acknowledged += 1
                newest = max(newest, value)
            elif what in ("problem", "raised"):
                found.problems.append(f"seed {seed}, life {number}: {value}")
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flaw", choices=FLAWS, help="a control: run with this flaw")
    chosen, started = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    logging.getLogger("jaxckpt_train").disabled = True
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if chosen.flaw is not None:
            FLAWS[chosen.flaw](patch)
        found = campaign(chosen.kills, chosen.seed, Path(folder))
    print(f"{found.kills} kills, {found.acknowledged} acknowledged saves; killed while {dict(found.during)}")
    leave_with(found.problems, started, chosen.seed)


if __name__ == "__main__":
    main()
