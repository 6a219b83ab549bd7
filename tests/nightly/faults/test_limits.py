"""A full or read-only disk, or a limit of the process: a clear error, nothing lost, and the next save succeeds."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.limits import LIMITS, UNCLEAR, campaign, lacks, why_not

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)


def skip_unless_possible(name: str) -> None:
    reason = why_not(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def limits_of_memory(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the memory trials in a separate process; memory freed by this process would be available to their saves."""
    command = [sys.executable, "-m", "tests.nightly.faults.limits", "--limits", "memory", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", [name for name in LIMITS if name != "memory"])
def test_run_at_limit_loses_nothing_and_explains(tmp_path: Path, name: str) -> None:
    skip_unless_possible(name)
    found = campaign([name], tmp_path)
    assert found.problems == []
    assert found.failed[name] > 0, "no save was refused: the limit had no effect"


def test_run_without_memory_loses_nothing_and_explains() -> None:
    done = limits_of_memory()
    assert done.returncode == 0, done.stdout + done.stderr
    refused = re.search(r"in (\d+) of them the save was refused", done.stdout)
    assert refused is not None
    assert int(refused[1]) > 0, "no save was refused: the limit had no effect"


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("[Errno 28] cannot write: No space left on device; free some space or choose another directory: '/a/b/c'", []),
        ("[Errno 28] cannot write 327680 bytes at 0: No space left on device: '/a/b/c'", ["what to do"]),
        ("no room: free some space or choose another directory", ["of what it is", "what was refused"]),
    ],
)
def test_missing_parts_of_an_error_are_named(message: str, missing: list[str]) -> None:
    assert lacks("full disk", Path("/a/b"), message) == missing


@pytest.mark.parametrize(
    ("name", "flaw", "symptom"),
    [
        ("full disk", "errors of writes are ignored", "CorruptCheckpointError"),
        ("file size", "errors of writes are ignored", "CorruptCheckpointError"),
        ("descriptors", "leaves attempts", "left over in a life"),
        ("read-only", "raises the error of a read-only disk unwrapped", "Read-only file system"),
    ],
)
def test_flawed_writer_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flaw: str, symptom: str
) -> None:
    skip_unless_possible(name)
    monkeypatch.setattr("jaxckpt_train.run.lock.SILENCE_S", 1.0)  # a flawed owner may leave its lock behind
    FLAWS[flaw](monkeypatch)
    problems = [problem for problem in campaign([name], tmp_path).problems if UNCLEAR not in problem]
    assert any(symptom in problem for problem in problems)


def test_leftover_attempts_without_memory_are_detected() -> None:
    done = limits_of_memory("--flaw", "leaves attempts")
    assert done.returncode == 1, done.stderr
    assert "left over in a life" in done.stdout + done.stderr
