"""Campaign: one process of a job is stopped or killed at any moment of a save or a restore; the others must name it.

    python -m tests.nightly.distributed.stops --trials 20

In each trial a fresh job resumes from the directory of the previous trial. Its processes first do the save or the
restore without a signal, to count its moments: calls of the key-value store and of the disk. Then they do it again,
and one process gets its signal at one of these moments.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from tests.nightly.distributed.trapped import LIMIT_S, act, act_and_be_stopped, go_on
from tests.support.jobs.job import running

PROCESSES, GRACE_S = 4, 5.0
SIGNALS = {"SIGSTOP": signal.SIGSTOP, "SIGKILL": signal.SIGKILL}


@dataclasses.dataclass
class Trial:
    """One trial and its outcome."""

    what: str
    signal: str
    victim: int
    at: int = 0
    of: int = 0
    late_s: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        where = f"{self.what}, {self.signal} of process {self.victim} at moment {self.at} of {self.of}"
        return f"{where}: {self.said} after {self.late_s:.1f} s"


def try_once(directory: Path, trial: Trial, chance: random.Random, allowance_s: float = GRACE_S) -> bool:
    """Run one trial on a directory.

    Returns:
        Whether the signal was sent. Background calls vary, so a save may have fewer moments the second time.

    Raises:
        AssertionError: a process was late, named another process, or a step was lost.
    """
    first, note = not any(directory.glob("step-*")), directory.parent / "stopped-at"
    note.unlink(missing_ok=True)
    with running(PROCESSES, 1) as job:
        step = job.call(go_on, str(directory), first)[0]
        counts = job.call(act, trial.what, step if trial.what == "restore" else step + 1)
        step += trial.what == "save"
        trial.of = counts[trial.victim]
        trial.at = chance.randint(1, trial.of)
        others = [number for number in range(PROCESSES) if number != trial.victim]
        arguments = (
            trial.what,
            step + (trial.what == "save"),
            trial.victim,
            trial.at,
            SIGNALS[trial.signal],
            str(note),
        )
        answers = job.outcomes(act_and_be_stopped, *arguments, heard=others, timeout_s=LIMIT_S + 90)
        stopped_at = float(note.read_text()) if note.exists() else None
    for number, answer in zip(others, answers, strict=True):
        if stopped_at is not None:
            check(trial, number, answer, stopped_at, allowance_s)
    committed = max(jct.StepManager(directory).steps)
    assert committed in (step, step + 1), f"{trial}: step {step} was committed, and {committed} is the newest"
    report = jct.verify(jct.StepManager(directory).path(step))
    assert report.ok, f"{trial}: {report.problems}"
    return stopped_at is not None


def check(trial: Trial, number: int, answer: dict[str, Any], stopped_at: float, allowance_s: float) -> None:
    """Check that a process that was not stopped named the stopped one in time, or was done before."""
    if "value" not in answer:
        # Process 0 runs the service of the job: JAX ends the other processes when it is lost.
        assert trial.victim == 0, f"{trial}: process {number}: {answer}"
        assert "distributed service detected fatal errors" in answer["error"], f"{trial}: process {number}: {answer}"
        trial.said = "ended by JAX"
        return
    value = answer["value"]
    trial.late_s = max(trial.late_s, value["at"] - stopped_at)
    trial.said = value["error"] or trial.said or "done by then"
    assert trial.late_s <= LIMIT_S + allowance_s, f"{trial}: process {number} was late"
    if value["error"] is not None and trial.victim != 0:
        assert f"process {trial.victim} of {PROCESSES}" in value["error"], f"{trial}: process {number}: {value}"


def campaign(trials: int, seed: int, report: Callable[[str], object], victims: int = PROCESSES) -> list[Trial]:
    """Run this number of trials of each kind, and report each."""
    chance, done = random.Random(seed), list[Trial]()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        for number in range(trials):
            for what in ("save", "restore"):
                for name in SIGNALS:
                    trial = Trial(what, name, chance.randrange(PROCESSES - victims, PROCESSES))
                    while not try_once(directory, trial, chance):
                        pass
                    done.append(trial)
                    report(f"{number + 1}/{trials} {trial}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each signal, in saves and in restores")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done = campaign(options.trials, options.seed, lambda line: print(line, flush=True))
    latest = max(trial.late_s for trial in done)
    print(
        f"{len(done)} trials: nothing lost; at the latest {latest:.1f} s after the stop, of {LIMIT_S + GRACE_S:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
