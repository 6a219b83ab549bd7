"""train_digits.py: preempted or killed in the middle, it ends as if it had not been interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# test_demo.py preempts this script; test_resume_proof.py kills a training, and the campaign in tests/nightly/kill does.
pytestmark = pytest.mark.nightly

STEPS = 1000
PIPE_BYTES = 4096
# The losses go through a pipe that holds some 200 lines: the training cannot come to its end before they are read.
# A save that is due waits for the one before: after two of them the first is committed.
SETTINGS = (
    *(f"steps={STEPS}", "batch_size=8", "hidden=32", "losses=/dev/stdout", "checkpoint=cheap"),
    *("checkpoint.directory=run", "checkpoint.save_interval_steps=50", "checkpoint.if_busy=wait"),
)
LOSS = re.compile(r"^(\d+) (-?0x\S+)$", re.MULTILINE)


def losses_in(text: str) -> list[tuple[int, str]]:
    return [(int(number), loss) for number, loss in LOSS.findall(text)]


def whole(cwd: Path) -> dict[str, bytes]:
    """The data files of the last checkpoint."""
    step = cwd / "run" / f"step-{STEPS:010d}"
    files = [file for part in ("state", "data") for file in sorted((step / part).iterdir())]
    return {str(file.relative_to(step)): file.read_bytes() for file in files}


def saved_steps(cwd: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (cwd / "run").glob("step-*"))


@pytest.fixture
def start_and_signal(repo_root: Path, plugin: Path, compiled: dict[str, str], tmp_path: Path) -> Any:
    """Run it in tmp_path, send a signal once `after` updates are done, and return the exit code and the output."""

    def start(number: signal.Signals, after: int, *arguments: str) -> tuple[int, str]:
        with subprocess.Popen(
            [sys.executable, str(repo_root / "examples" / "train_digits.py"), *arguments],
            cwd=tmp_path,
            env={**os.environ, **compiled, "PYTHONPATH": os.pathsep.join([str(plugin), str(repo_root)])},
            stdout=subprocess.PIPE,
            text=True,
            pipesize=PIPE_BYTES,
        ) as process:
            assert process.stdout is not None
            lines = []
            while not (lines and lines[-1].startswith(f"{after} ")):
                lines.append(process.stdout.readline())
                assert lines[-1], f"it ended before update {after}: {''.join(lines)}"
            process.send_signal(number)
            rest = process.stdout.read()
            return process.wait(), "".join(lines) + rest

    return start


@pytest.fixture(scope="module")
def left_alone(run_example: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory and the losses of a training that was not interrupted."""
    cwd = tmp_path_factory.mktemp("left-alone")
    return cwd, losses_in(run_example("train_digits.py", *SETTINGS, cwd=cwd))


def test_training_resumes_exactly_after_sigterm_and_sigkill(
    left_alone: Any, start_and_signal: Any, run_example: Any, tmp_path: Path
) -> None:
    cwd, losses = left_alone
    assert [number for number, _ in losses] == list(range(1, STEPS + 1))

    code, output = start_and_signal(signal.SIGTERM, 100, *SETTINGS)
    first = losses_in(output)
    assert code == 75
    assert 100 <= len(first) < STEPS
    assert saved_steps(tmp_path)[-1] == len(first), "the last update is saved"

    code, output = start_and_signal(signal.SIGKILL, len(first) + 120, *SETTINGS)
    second = losses_in(output)
    assert code == -signal.SIGKILL
    assert f"starting after {len(first)} of {STEPS} updates" in output
    done, saved = len(first) + len(second), saved_steps(tmp_path)[-1]
    assert len(first) < saved <= done < STEPS, "an update since the restart is saved, if not the last"

    third = losses_in(run_example("train_digits.py", *SETTINGS, cwd=tmp_path))
    assert first + second == losses[:done]
    assert third == losses[saved:]
    assert whole(tmp_path) == whole(cwd)


def test_the_same_command_after_the_end_changes_nothing(left_alone: Any, run_example: Any) -> None:
    cwd, _ = left_alone
    before = whole(cwd)
    output = run_example("train_digits.py", *SETTINGS, cwd=cwd)
    assert f"starting after {STEPS} of {STEPS} updates" in output
    assert losses_in(output) == []
    assert saved_steps(cwd)[-1] == STEPS
    assert whole(cwd) == before
