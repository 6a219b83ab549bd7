"""Jobs that several tests share, because a start takes seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.jobs.job import Job

JobOf = Callable[[int, int], Job]
MOST_JOBS = 4  # idle jobs at one time


_jobs: dict[tuple[int, int], Job] = {}  # ordered by their last use


@pytest.fixture(scope="session")
def job_of() -> JobOf:
    """`job_of(processes, devices)` returns an idle job, or a new one if a test ended it."""

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
    """End the jobs before other tests, so that they take no memory and time from these."""
    if nextitem is None or not {"distributed", "tiers"} & {*nextitem.path.parts}:
        while _jobs:
            _jobs.popitem()[1].end()
