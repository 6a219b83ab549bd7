"""Jobs that several tests use, one after the other, since to start one takes seconds; how often tests try things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from tests.distributed.job import Job

JobOf = Callable[[int, int], Job]


class Trials(Protocol):
    """How often a test tries something."""

    def __call__(self, short: int, full: int) -> int:
        """`short`; with `--full`, `full`."""


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Trials:
    """See Trials."""
    return lambda short, full: full if request.config.getoption("full") else short


@pytest.fixture(scope="session")
def job_of() -> Iterator[JobOf]:
    """`job_of(processes, devices)`: a job that waits for calls; another one if a test has ended it."""
    jobs: dict[tuple[int, int], Job] = {}

    def job(processes: int, devices: int = 1) -> Job:
        found = jobs.get((processes, devices))
        if found is None or not found.is_alive():
            found = jobs[processes, devices] = Job(processes, devices)
        return found

    yield job
    for each in jobs.values():
        each.end()
