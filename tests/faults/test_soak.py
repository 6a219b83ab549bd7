"""A short soak: a training on a disk that misbehaves neither grows nor loses anything. The whole is `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuse_disk import why_not
from tests.faults.soak import growth, soak


@pytest.mark.timeout(120)
def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no file system in user space: {reason}")
    found = soak(20, 0, 0.05, tmp_path)
    assert found.problems == []
    assert found.rows[-1]["committed"] > 20
    assert found.rows[-1]["failed"] > 0


def test_growth_is_found_out() -> None:
    rows = [{"resident": n << 22, "threads": 3, "files": 9 + n} for n in range(60)]
    assert [problem.split()[0] for problem in growth(rows)] == ["resident", "files"]
