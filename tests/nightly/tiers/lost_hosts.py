"""SIGKILL a host of a job at a random moment and erase its directory: `python -m tests.nightly.tiers.lost_hosts`.

Network namespaces stand for hosts. In each trial a job restores the newest step, checks every byte, and saves steps
until one of its hosts, or two, are killed and erased. The next job must find the last step that was acknowledged. After
a kill before the first save nothing is erased: the step that was restored still lacks what the last loss took.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.jobs import fast, namespaces
from tests.support.jobs.job import Job

START_S = 120.0
LONGEST_S = 0.7
"""A host is killed so long after the job has restored, at most: some saves later."""


class Trials:
    """Jobs of one run, one after another, each with lost hosts.

    Args:
        folder: where the tiers are.
        hosts: the number of hosts, and of processes.
        redundancy: as `FastTierSettings.redundancy`.
        killed: how many hosts are killed in each trial.

    Attributes:
        is_protected: the newest step has all its copies or parity.
    """

    def __init__(self, folder: Path, hosts: int, redundancy: str, killed: int, seed: int) -> None:
        self.folder, self.hosts, self.redundancy, self.killed = folder, hosts, redundancy, killed
        self.random, self.found = random.Random(seed), Counter[str]()
        self.problems: list[str] = []
        self.is_protected = True
        self.slow, self.log = folder / "slow", folder / "log"
        self.log.touch()

    def lines(self) -> list[tuple[str, int]]:
        """What the jobs have noted so far."""
        pairs = [line.rpartition(" ") for line in self.log.read_text().splitlines()]
        return [(what, int(step)) for what, _, step in pairs]

    def run(self, names: list[str], number: int) -> None:
        """Start a job, check what it restores, and kill hosts."""
        lost = self.random.sample(range(self.hosts), self.killed)
        with self.job(names, number) as job:
            time.sleep(self.random.uniform(0, LONGEST_S))
            for host in lost:
                job.workers[host].process.kill()
        if self.is_protected:
            for host in lost:
                self.erase(host)

    def erase(self, host: int) -> None:
        """Remove what a host has."""
        shutil.rmtree(self.folder / "fast" / f"host{host}", ignore_errors=True)
        self.is_protected = False

    @contextlib.contextmanager
    def job(self, names: list[str], number: int) -> Iterator[Job]:
        """A job on these hosts that has restored the right step, and saves until it is killed in the end."""
        before = self.lines()
        newest = before[-1][1] if before else 0
        job = Job(len(names), 1, names, heartbeat_timeout_seconds=100)
        options: dict[str, Any] = {"redundancy": self.redundancy, "timeout_s": 5.0}
        call = threading.Thread(
            target=job.outcomes,
            args=(fast.train, str(self.slow), str(self.folder / "fast"), str(self.log), options),
            kwargs={"timeout_s": 1000.0},
            daemon=True,
        )
        call.start()
        try:
            restored = self._wait(len(before))
            self._check(number, restored, newest)
            yield job
        finally:
            for worker in job.workers:
                worker.process.kill()
            call.join()
            job.end()
            self.is_protected = self.is_protected or any(what == "saved" for what, _ in self.lines()[len(before) :])

    def _wait(self, known: int) -> tuple[str, int]:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            lines = self.lines()[known:]
            if lines:
                return lines[0]
            time.sleep(0.02)
        raise AssertionError("the job has not restored in time")

    def _check(self, number: int, restored: tuple[str, int], newest: int) -> None:
        what, step = restored
        self.found["ahead" if step > newest else "newest" if step == newest else "older"] += 1
        if what != "restored":
            self.problems.append(f"trial {number}: {what} at step {step}")
        if step < newest:
            self.problems.append(f"trial {number}: restored step {step}, but {newest} was acknowledged")


def campaign(trials: int, hosts: int, redundancy: str, killed: int, seed: int) -> Trials:
    """Run trials in a new folder."""
    with tempfile.TemporaryDirectory(prefix="lost-hosts-") as folder, namespaces.network(hosts) as names:
        found = Trials(Path(folder), hosts, redundancy, killed, seed)
        for number in range(trials):
            found.run(names, number)
            print(f"trial {number}: {dict(found.found)}", *found.problems[-1:], flush=True)
    return found


def main() -> None:
    """Print what was found; exit with 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--redundancy", default="partner", choices=["none", "partner", "xor", "p+q"])
    parser.add_argument("--killed", type=int, default=1, help="hosts that are lost in each trial")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if (reason := namespaces.why_not()) is not None:
        print(f"SKIP: {reason}")
        return
    found = campaign(options.trials, options.hosts, options.redundancy, options.killed, options.seed)
    print("\n".join(found.problems))
    print(f"{options.trials} trials, {options.redundancy}, {options.killed} lost: {dict(found.found)}")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
