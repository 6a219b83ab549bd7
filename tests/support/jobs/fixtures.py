"""Jobs that several tests share, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.jobs.job import Job

JobOf = Callable[[int, int], Job]
MOST_JOBS = 4  # that wait at a time


_jobs: dict[tuple[int, int], Job] = {}  # the one that was asked for last is last


@pytest.fixture(scope="session")
def job_of() -> JobOf:
    """`job_of(processes, devices)`: a job that waits for calls; another one if a test has ended it."""

    def job(processes: int, devices: int = 1) -> Job:
        found = _jobs.pop((processes, devices), None)
        if found is None or not found.is_alive():
            found = Job(processes, devices)
        _jobs[processes, devices] = found
        for size in list(_jobs)[:-MOST_JOBS]:
            _jobs.pop(size).end()
        return found

    return job


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the jobs before tests of something else, from which they would take memory and time."""
    if nextitem is None or "distributed" not in nextitem.path.parts:
        while _jobs:
            _jobs.popitem()[1].end()
