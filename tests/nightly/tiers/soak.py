"""Train with a fast tier under random faults: `python -m tests.nightly.tiers.soak [--minutes 30]`.

Network namespaces stand for hosts, and the directory of the run is on a disk that is slow, refuses, or does not respond
at times. Jobs follow each other, each with one fault:

- all processes are killed, or one host is lost with its directory;
- a process stops, or the network loses a host: the other processes must report it;
- the storage is slow, refuses changes, or does not respond;
- a byte changes in what a host has of the newest step;
- a host is away for one job, and comes back with the older steps that it has; or one more host takes part.

Each job must restore the last step that was acknowledged, or a newer one, and the right bytes; no step may be
acknowledged twice. What the hosts hold must not grow.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import jaxckpt_train as jct
from tests.nightly.faults.fuse_disk import ANSWER, WEDGED, FuseDisk, fuse_disk
from tests.nightly.faults.fuse_disk import why_not as why_no_disk
from tests.nightly.tiers.lost_hosts import Trials
from tests.support.jobs import fast, namespaces
from tests.support.jobs.job import Job

HOSTS = 4
PHASE_S, STORAGE_S = 3.0, 8.0
REPORT_S = 90.0  # the time limits of the job are 20 s for a barrier and 5 s for a host, one after another
MOST_STEPS, MOST_ATTEMPTS = 6, 2  # on a host
STORAGE = {"slow storage": (ANSWER, 0.5, 0), "storage refuses": (ANSWER, 0.0, 100), "storage hangs": (WEDGED, 0.0, 0)}
FAULTS = ("killed", "lost", "stopped", "cut off", "damaged", "away", "one more", *STORAGE)


class Soak:
    """The jobs of a run, with a fault each.

    Args:
        folder: where the hosts have their directories.
        disk: where the directory of the run is.
        names: the namespaces, one more than `HOSTS`.

    Attributes:
        saved: how many steps were acknowledged.
    """

    def __init__(self, folder: Path, disk: FuseDisk, names: list[str], redundancy: str, seed: int) -> None:
        self._disk, self._names = disk, names
        self.trials, self.faults = Trials(folder, HOSTS, redundancy, 1, seed), Counter[str]()
        self.trials.slow = disk.path / "run"
        self._random, self.saved = self.trials.random, 0

    def run(self, number: int) -> None:
        """One job with one fault."""
        fault = self._random.choice(FAULTS)
        if fault in ("lost", "damaged", "away") and not self.trials.is_protected:
            fault = "killed"
        hosts = {"away": HOSTS - 1, "one more": HOSTS + 1}.get(fault, HOSTS)
        host = self._random.randrange(hosts)
        if fault == "away":
            self.trials.is_protected = False  # until this job has saved a step
        with self.trials.job(self._names[:hosts], number) as job:
            time.sleep(self._random.uniform(0, PHASE_S))
            self._during(fault, job, host)
        if fault == "lost":
            self.trials.erase(host)
        if fault == "one more":
            self.trials.is_protected = False  # the next job lacks this host
        if fault == "damaged":
            self._damage(host)
        self.faults[fault] += 1
        self._count(number)

    def _during(self, fault: str, job: Job, host: int) -> None:
        process = job.workers[host].process
        if fault == "lost":
            process.kill()
        elif fault == "stopped":
            process.send_signal(signal.SIGSTOP)
            self._wait_for_report(fault, job, host)
        elif fault == "cut off":
            namespaces.set_link(self._names[host], up=False)
            self._wait_for_report(fault, job, host)
            namespaces.set_link(self._names[host], up=True)
        elif fault in STORAGE:
            self._disk.set(*STORAGE[fault])
            time.sleep(self._random.uniform(0, STORAGE_S))
            self._disk.set()
            time.sleep(self._random.uniform(0, PHASE_S))

    def _wait_for_report(self, fault: str, job: Job, host: int) -> None:
        others = [number for number in range(job.processes) if number != host]
        end = time.monotonic() + REPORT_S
        while any(job.is_silent(number) for number in others):
            if time.monotonic() > end:
                self.trials.problems.append(f"{fault} {host}: not all others have reported it in {REPORT_S:g} s")
                return
            time.sleep(0.1)

    def _damage(self, host: int) -> None:
        """Change one byte of what a host has of the newest step."""
        folders = sorted(self.trials.folder.glob(f"fast/host{host}/run-*/step-*"))
        files = [each for each in folders[-1].rglob("*") if each.is_file() and each.stat().st_size] if folders else []
        if files:
            file = self._random.choice(sorted(files))
            data = bytearray(file.read_bytes())
            data[self._random.randrange(len(data))] ^= self._random.randrange(1, 256)
            file.write_bytes(data)
            self.trials.is_protected = False

    def _count(self, number: int) -> None:
        for folder in self.trials.folder.glob("fast/host*/run-*"):
            names = [each.name for each in folder.iterdir()]
            steps, attempts = (sum(name.startswith(start) for name in names) for start in ("step-", ".step-"))
            if steps > MOST_STEPS or attempts > MOST_ATTEMPTS:
                self.trials.problems.append(f"trial {number}: {folder} has {steps} steps and {attempts} attempts")

    def check_history(self) -> None:
        """No step was acknowledged twice, and each step in the directory of the run has the right bytes."""
        saved = [step for what, step in self.trials.lines() if what == "saved"]
        self.saved = len(saved)
        if saved != sorted(set(saved)):
            self.trials.problems.append("a step was acknowledged twice, or after a newer one")
        with jct.StepManager(self.trials.slow) as manager:
            for step in manager.steps:
                state = manager.restore({"state": {name: fast.values_of(name, 0) for name in fast.SHAPES}}, step)
                wrong = [name for name, value in state["state"].items() if not _is_right(name, step, value)]
                self.trials.problems += [f"step {step} in the run has wrong bytes: {wrong}"] if wrong else []


def _is_right(name: str, step: int, value: np.ndarray) -> bool:
    return np.array_equal(value, fast.values_of(name, step))


def soak(seconds: float, redundancy: str, seed: int) -> Soak:
    """Run jobs for this time."""
    with (
        tempfile.TemporaryDirectory(prefix="fast-soak-") as place,
        namespaces.network(HOSTS + 1) as names,
        fuse_disk(Path(place)) as disk,
    ):
        folder = Path(place, "hosts")
        folder.mkdir()
        found, end, number = Soak(folder, disk, names, redundancy, seed), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            known = len(found.trials.problems)
            found.run(number)
            print(f"job {number}: {dict(found.faults)}", *found.trials.problems[known:], flush=True)
            number += 1
        found.check_history()
    return found


def why_not() -> str | None:
    """Return why it cannot run here, or None."""
    return namespaces.why_not() or why_no_disk()


def main() -> None:
    """Print what was found; exit with 1 if there are problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--redundancy", default="partner", choices=["partner", "xor", "p+q"])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"SKIP: {reason}")
        return
    found = soak(60 * options.minutes, options.redundancy, options.seed)
    print("\n".join(found.trials.problems))
    print(f"{options.minutes:g} minutes, seed {options.seed}, {options.redundancy}: {found.saved} steps acknowledged")
    print(f"faults {dict(found.faults)}; restored {dict(found.trials.found)}; {len(found.trials.problems)} problems")
    sys.exit(1 if found.trials.problems else 0)


if __name__ == "__main__":
    main()
