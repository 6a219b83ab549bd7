"""Jobs that several tests use, one after the other: to start one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.job import Job

JobOf = Callable[[int, int], Job]


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
