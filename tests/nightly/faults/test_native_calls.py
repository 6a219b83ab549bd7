"""Native calls that fail, fall short, or are the last of a process lose nothing; flawed writers are detected.

`make native-calls` runs the whole campaign.
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
        pytest.skip(f"cannot inject faults into native calls: {reason}")


def test_sample_of_native_calls_loses_nothing(tmp_path: Path) -> None:
    done = preloaded(tmp_path, "--every", EVERY, *MEMORY)
    assert done.returncode == 0, done.stdout
    assert "\n0 problems" in done.stdout
    assert all(f'"{name}": ' in done.stdout for name in (*FAULTS, *PROGRAMS))


def test_each_kind_of_fault_has_a_control() -> None:
    assert {control.fault for control in CONTROLS} == set(FAULTS)


def test_flawed_writers_are_detected(tmp_path: Path) -> None:
    done = preloaded(tmp_path, "--controls", *MEMORY)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": detected") == len(CONTROLS)
