"""Saves to the fast tier take bounded memory, and 500 of them no more than a few."""

from __future__ import annotations

import sys
import tempfile

import pytest

from tests.support.jobs import fast
from tests.support.jobs.job import running

SAVES, HOSTS, MIB = 500, 3, 16
SLACK = {"resident": 8 << 20, "peak": 8 << 20, "threads": 1, "files": 2}
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]


@pytest.mark.parametrize("redundancy", ["partner", "p+q"])
def test_memory_of_many_saves(redundancy: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, running(HOSTS) as job:
        places = (f"{folder}/slow", f"{folder}/fast")
        options = {"redundancy": redundancy}
        processes = job.call(fast.saves_often, *places, SAVES, MIB, options, timeout_s=800.0)
    for rows in processes:
        # A copy of the state, buffers, and some 50 MiB that malloc keeps.
        assert max(row["peak"] for row in rows) <= (MIB + 80) << 20
        third = len(rows) // 3
        for name, slack in SLACK.items():
            before, after = (max(row[name] for row in part) for part in (rows[third : 2 * third], rows[2 * third :]))
            assert after <= before + slack, (name, before, after)
