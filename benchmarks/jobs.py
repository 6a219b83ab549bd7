"""Saves and loads by jobs of several processes: `python -m benchmarks.jobs`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import run
from benchmarks.job_workloads import FEW, REPLICATED_JOB, ROWS, job_workloads
from benchmarks.registry import IN_JOBS

JOBS = run.Command("benchmarks.jobs", __doc__ or "", job_workloads, (ROWS[FEW], REPLICATED_JOB), IN_JOBS)


def main(arguments: Sequence[str] | None = None) -> None:
    """See `benchmarks.run`; the page is `jobs.md`."""
    run.main(arguments, JOBS)


if __name__ == "__main__":
    main()
