"""Tests of runs, callbacks, checkpoints and commands, on an object store; the nightly tier has most of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.disk_only import DISK_ONLY
from tests.support.tiers import nightly_after

# Files or folders, and how many tests pass at least.
SELECTED = [
    ("tests/unit/test_manager.py", 30),
    ("tests/unit/test_checkpoint.py", 20),
    ("tests/unit/test_callback*.py", 140),
    ("tests/unit/run", 190),
    ("tests/unit/cli", 170),
    ("tests/unit/test_bad_input.py", 80),
    ("tests/unit/test_metadata.py", 8),
    ("tests/unit/test_[dlps]*.py", 60),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("selected", "least"), nightly_after(1, SELECTED))
def test_same_tests_pass_in_bucket(selected: str, least: int, repo_root: Path) -> None:
    files = sorted(map(str, repo_root.glob(selected)))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--in-bucket", *files]
    done = subprocess.run(
        command, cwd=repo_root, env=variables, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least


def test_listed_tests_exist(repo_root: Path) -> None:
    for name in DISK_ONLY:
        file, _, test = name.partition("::")
        assert f"def {test}" in (repo_root / file).read_text()
