"""A short soak: a training on a disk that misbehaves neither grows nor loses anything. The whole is `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuse_disk import why_not
from tests.faults.soak import TRAINING, growth, soak

pytestmark = pytest.mark.timeout(120)
STEP = "state, step = update(state), step + 1\n"


@pytest.fixture(autouse=True)
def _fuse() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no file system in user space: {reason}")


def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    found = soak(20, 0, 0.05, tmp_path)
    assert found.problems == []
    assert found.rows[-1]["committed"] > 20
    assert found.rows[-1]["failed"] > 0


def test_a_training_that_leaks_is_found_out(tmp_path: Path) -> None:
    assert STEP in TRAINING
    leaking = TRAINING.replace(STEP, f"{STEP}                step % 5 or os.dup(1)\n")
    assert any(problem.startswith("files grew") for problem in soak(10, 0, 0.05, tmp_path, leaking).problems)


def test_growth_is_found_out() -> None:
    rows = [{"resident": n << 22, "threads": 3, "files": 9 + n} for n in range(60)]
    assert [problem.split()[0] for problem in growth(rows)] == ["resident", "files"]
