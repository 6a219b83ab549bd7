"""Native calls that fail, fall short, or are a process's last: nothing is lost; a writer with a flaw is found out.

The whole campaign is `make native-calls`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.native_calls import FAULTS, preloaded, why_not

pytestmark = pytest.mark.timeout(300)
EVERY = "31"


@pytest.fixture(autouse=True)
def _can() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"native calls cannot be made to fail here: {reason}")


def test_some_of_all_calls(tmp_path: Path) -> None:
    done = preloaded(tmp_path, "--every", EVERY)
    assert done.returncode == 0, done.stdout
    assert "\n0 problems" in done.stdout
    assert all(f'"{name}": ' in done.stdout for name in FAULTS)


@pytest.mark.parametrize(
    ("flaw", "fault", "every", "symptom"),
    [
        ("no retries", "EINTR", "9", "the run noticed"),
        ("errors are ignored", "ENOSPC", "3", "CorruptCheckpointError"),
        ("deletes first", "SIGKILL after", "9", "are gone"),
    ],
)
def test_a_writer_with_a_flaw_is_found_out(tmp_path: Path, flaw: str, fault: str, every: str, symptom: str) -> None:
    done = preloaded(tmp_path, "--every", every, "--faults", fault, "--flaw", flaw)
    assert done.returncode == 1
    assert symptom in done.stdout
