"""Kill a real training with SIGKILL at random moments, and check that nothing is lost.

After each kill a fresh process must resume from a committed step, no earlier than the last one that was acknowledged,
and its losses must equal those of an uninterrupted run, byte for byte.

`python -m tests.nightly.kill.campaign --kills 60`
"""

from __future__ import annotations

import argparse
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

from tests.support.paths import REPO_ROOT

TRAINING = Path(__file__).with_name("training.py")
ROOT = REPO_ROOT
LEAST_LOSSES = 5
MOST_LOSSES = 25


@dataclasses.dataclass(frozen=True)
class Life:
    """One process: the step that it resumed from, and the losses that it printed before the kill, as text by step."""

    resumed: int
    losses: dict[int, str]


def start(directory: Path, updates: int, *more: str) -> subprocess.Popen[str]:
    """Start the training."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, str(TRAINING), str(directory), str(updates), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def lines(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Yield the words of each complete line that the process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):
            yield line.split()


def reference(updates: int) -> dict[int, str]:
    """Return the losses of an uninterrupted run without saves."""
    with tempfile.TemporaryDirectory() as folder:
        with start(Path(folder), updates, "--off") as process:
            losses = {int(words[0]): words[1] for words in lines(process) if words[0] != "resumed"}
        assert process.returncode == 0
    assert len(losses) == updates
    return losses


def live_and_die(directory: Path, updates: int, chance: random.Random) -> Life:
    """Start the training, and kill it at a random moment of a save after a random number of losses."""
    kill_after = chance.randint(LEAST_LOSSES, MOST_LOSSES)
    moment_s = chance.uniform(0, 0.03)
    resumed, losses = -1, {}
    with start(directory, updates) as process:
        for words in lines(process):
            if words[0] == "resumed":
                resumed = int(words[1])
                continue
            losses[int(words[0])] = words[1]
            if len(losses) == kill_after:
                time.sleep(moment_s)
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, f"the training ended by itself with {process.returncode}"
    return Life(resumed, losses)


def check(life: Life, expected: dict[int, str], acknowledged: int) -> None:
    """Compare one life with the uninterrupted run."""
    assert life.resumed >= acknowledged, f"resumed from {life.resumed}, but {acknowledged} was acknowledged"
    assert list(life.losses) == list(range(life.resumed + 1, life.resumed + 1 + len(life.losses)))
    assert len(life.losses) >= LEAST_LOSSES
    for step, loss in life.losses.items():
        assert loss == expected[step], f"update {step}: loss {loss}, uninterrupted {expected[step]}"


def campaign(kills: int, seed: int, directory: Path) -> list[Life]:
    """Kill the training `kills` times, and return its lives.

    Raises:
        AssertionError: a promise was broken.
    """
    chance = random.Random(seed)
    updates = (kills + 1) * (MOST_LOSSES + 20)
    expected = reference(updates)
    lives: list[Life] = []
    acknowledged = 0
    for number in range(kills + 1):  # one more life checks what the last kill left
        life = live_and_die(directory, updates, chance)
        check(life, expected, acknowledged)
        acknowledged = max(life.losses) - 1
        lives.append(life)
        print(f"kill {number}: resumed from {life.resumed}, {len(life.losses)} losses equal", flush=True)
    return lives


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            lives = campaign(chosen.kills, chosen.seed, Path(folder, "run"))
        except AssertionError as problem:
            print(f"1 problems, seed {chosen.seed}: {problem}")
            raise SystemExit(1) from problem
    losses = sum(len(life.losses) for life in lives)
    print(f"{chosen.kills} kills: each resumed from a committed step; {losses} losses equal byte for byte; 0 problems")


if __name__ == "__main__":
    main()
