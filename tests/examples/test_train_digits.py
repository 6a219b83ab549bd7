"""train_digits.py: asked to leave or killed in the middle, it ends as if it had been left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

STEPS = 1000
PIPE_BYTES = 4096
# The losses go through a pipe that holds some 200 lines: the training cannot come to its end before they are read.
SETTINGS = (f"steps={STEPS}", "hidden=32", "losses=/dev/stdout", "checkpoint.directory=run")
SETTINGS_OF_A_KILL = (*SETTINGS, "checkpoint.save_interval_steps=50")
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
def start_and_signal(repo_root: Path, plugin: Path, tmp_path: Path) -> Any:
    """Starts it in tmp_path and sends a signal once `after` updates are done; gives the exit code and the output."""

    def start(number: signal.Signals, after: int, *arguments: str) -> tuple[int, str]:
        with subprocess.Popen(
            [sys.executable, str(repo_root / "examples" / "train_digits.py"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), str(repo_root)])},
            stdout=subprocess.PIPE,
            text=True,
            pipesize=PIPE_BYTES,
        ) as process:
            assert process.stdout is not None
            lines = []
            while f"{after} " not in (lines[-1] if lines else ""):
                lines.append(process.stdout.readline())
                assert lines[-1], f"it ended before update {after}: {''.join(lines)}"
            process.send_signal(number)
            rest = process.stdout.read()
            return process.wait(), "".join(lines) + rest

    return start


@pytest.fixture(scope="module")
def left_alone(run_example: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The losses and the last checkpoint of a training that nobody disturbed."""
    cwd = tmp_path_factory.mktemp("left-alone")
    output = run_example("train_digits.py", *SETTINGS, cwd=cwd)
    assert [number for number, _ in losses_in(output)] == list(range(1, STEPS + 1))
    return losses_in(output), whole(cwd)


def test_it_resumes_bit_for_bit_after_a_sigterm(
    left_alone: Any, start_and_signal: Any, run_example: Any, tmp_path: Path
) -> None:
    losses, checkpoint = left_alone
    code, first = start_and_signal(signal.SIGTERM, 100, *SETTINGS)
    done = len(losses_in(first))
    assert code == 75
    assert 100 <= done < STEPS
    assert saved_steps(tmp_path)[-1] == done
    second = run_example("train_digits.py", *SETTINGS, cwd=tmp_path)
    assert f"starting after {done} of {STEPS} updates" in second
    assert losses_in(first) + losses_in(second) == losses
    assert whole(tmp_path) == checkpoint


def test_it_resumes_bit_for_bit_after_a_sigkill(
    left_alone: Any, start_and_signal: Any, run_example: Any, tmp_path: Path
) -> None:
    losses, checkpoint = left_alone
    code, first = start_and_signal(signal.SIGKILL, 120, *SETTINGS_OF_A_KILL)
    done = len(losses_in(first))
    assert code == -signal.SIGKILL
    last = saved_steps(tmp_path)[-1]
    assert 0 < last <= done < STEPS
    second = run_example("train_digits.py", *SETTINGS_OF_A_KILL, cwd=tmp_path)
    assert losses_in(first) == losses[:done]
    assert losses_in(second) == losses[last:]
    assert whole(tmp_path) == checkpoint


def test_a_command_that_is_given_again_after_the_end_changes_nothing(run_example: Any, tmp_path: Path) -> None:
    settings = ("steps=3", "hidden=8", "checkpoint=critical", "checkpoint.directory=run", "losses=losses.txt")
    run_example("train_digits.py", *settings, cwd=tmp_path)
    steps = saved_steps(tmp_path)
    again = run_example("train_digits.py", *settings, cwd=tmp_path)
    assert "starting after 3 of 3 updates" in again
    assert saved_steps(tmp_path) == steps == [0, 3]
    assert len((tmp_path / "losses.txt").read_text().splitlines()) == 3
