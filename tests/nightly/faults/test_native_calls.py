"""Native calls that fail, fall short, or are a process's last: nothing is lost; a writer with a flaw is found out.

The whole campaign is `make native-calls`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.nightly.faults.native_calls import CONTROLS, FAULTS, preloaded
from tests.nightly.faults.native_programs import PROGRAMS
from tests.nightly.faults.needs import why_no_compiler

pytestmark = pytest.mark.timeout(600)
EVERY = "599"
MEMORY = ["--folder", "/dev/shm"] if os.access("/dev/shm", os.W_OK) else []


@pytest.fixture(autouse=True)
def _can() -> None:
    reason = why_no_compiler()
    if reason is not None:
        pytest.skip(f"native calls cannot be made to fail here: {reason}")


def test_some_of_all_calls(tmp_path: Path) -> None:
    done = preloaded(tmp_path, "--every", EVERY, *MEMORY)
    assert done.returncode == 0, done.stdout
    assert "\n0 problems" in done.stdout
    assert all(f'"{name}": ' in done.stdout for name in (*FAULTS, *PROGRAMS))


def test_each_kind_of_fault_has_a_control() -> None:
    assert {control.fault for control in CONTROLS} == set(FAULTS)


def test_writers_with_a_flaw_are_found_out(tmp_path: Path) -> None:
    done = preloaded(tmp_path, "--controls", *MEMORY)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": found out") == len(CONTROLS)
