"""Hosts that stop, or that the network loses: the others report it in time, and the next job continues."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import fast, namespaces
from tests.support.jobs.job import Job

pytestmark = pytest.mark.timeout(600)
HOSTS = 3
LIMIT_S = 90.0  # the time limits of the job are 20 s for a barrier and 5 s for a host, one after another


class Training:
    """A job that saves steps in the background until it ends."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.log = job, folder / "log"
        self.log.touch()
        self.outcomes: list[dict[str, Any]] = []
        options = {"redundancy": "partner", "timeout_s": 5.0}
        arguments = (str(folder / "slow"), str(folder / "fast"), str(self.log), options)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        self.outcomes = self.job.outcomes(fast.train, *arguments, timeout_s=1000.0)

    def steps(self, what: str) -> list[int]:
        lines = [line.rpartition(" ") for line in self.log.read_text().splitlines()]
        return [int(step) for kind, _, step in lines if kind == what]

    def wait_for_saves(self, number: int) -> None:
        end = time.monotonic() + 120
        while len(self.steps("saved")) < number:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def ends(self, others: list[int]) -> float:
        """Wait until the processes `others` have reported; return the seconds."""
        start = time.monotonic()
        while time.monotonic() - start < LIMIT_S and any(self.job.is_silent(number) for number in others):
            time.sleep(0.1)
        return time.monotonic() - start

    def kill(self) -> None:
        for worker in self.job.workers:
            worker.process.kill()
        self._thread.join()
        self.job.end()


@contextlib.contextmanager
def training(folder: Path, names: list[str]) -> Iterator[Training]:
    found = Training(Job(HOSTS, 1, names, heartbeat_timeout_seconds=300), folder)
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with namespaces.network(HOSTS) as names:
        yield names


@pytest.mark.parametrize("stopped", range(HOSTS))
def test_others_report_a_stopped_process(tmp_path: Path, hosts: list[str], stopped: int) -> None:
    others = [number for number in range(HOSTS) if number != stopped]
    with training(tmp_path, hosts) as job:
        job.wait_for_saves(3)
        job.job.workers[stopped].process.send_signal(signal.SIGSTOP)
        assert job.ends(others) < LIMIT_S
        newest = job.steps("saved")[-1]
    with training(tmp_path, hosts) as job:
        job.wait_for_saves(len(job.steps("saved")) + 1)
        assert job.steps("restored")[-1] >= newest
        assert not job.steps("wrong")


@pytest.mark.parametrize("lost", [1, 2])
def test_host_that_the_network_loses_starts_no_second_history(tmp_path: Path, hosts: list[str], lost: int) -> None:
    others = [number for number in range(HOSTS) if number != lost]
    with training(tmp_path, hosts) as job:
        job.wait_for_saves(3)
        namespaces.set_link(hosts[lost], up=False)
        assert job.ends(others) < LIMIT_S
        newest, saved = job.steps("saved")[-1], len(job.steps("saved"))
    namespaces.set_link(hosts[lost], up=True)
    with training(tmp_path, hosts) as job:
        job.wait_for_saves(saved + 3)
        assert job.steps("restored")[-1] >= newest
        assert job.steps("saved") == sorted(set(job.steps("saved")))
