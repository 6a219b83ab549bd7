"""The language model of the examples as a job: a preempted process stops all, and other jobs resume from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import jaxckpt_train as jct
from benchmarks.loopback import free_address
from tests.support import compiled_once
from tests.support.paths import REPO_ROOT

SMALL = ("layers=1", "width=32", "heads=4", "window=32", "batch_size=8", "checkpoint.save_interval_steps=1000")
PATIENCE_S = 150


class Training:
    """The example as a job of several processes."""

    def __init__(self, processes: int, devices: int, *arguments: str, cwd: Path) -> None:
        address = free_address()
        self.lines: list[list[str]] = [[] for _ in range(processes)]
        self.processes = [
            self._start(number, f"job.processes={processes}", f"job.coordinator={address}", f"devices={devices}",
                        *SMALL, *arguments, cwd=cwd)
            for number in range(processes)
        ]  # fmt: skip
        self._seen = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(processes)
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, number: int, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(REPO_ROOT / "examples" / "train_lm.py"), f"job.process={number}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT), **compiled_once.environment(cwd.parent / "compiled")},
            text=True,
        )

    def _read(self, number: int) -> None:
        output = self.processes[number].stdout
        assert output is not None
        with output:
            for line in output:
                with self._seen:
                    self.lines[number].append(line.rstrip())
                    self._seen.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until process 0 has printed a line that begins with this text."""
        with self._seen:
            found = self._seen.wait_for(lambda: any(line.startswith(text) for line in self.lines[0]), PATIENCE_S)
        assert found, self.last_lines()

    def end(self) -> list[int]:
        """Wait for all processes, and return their exit codes."""
        try:
            return [process.wait(PATIENCE_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
            for reader in self._readers:
                reader.join()

    def losses(self) -> list[str]:
        """Return the lines of the updates, which must be equal in all processes."""
        found = [[line for line in lines if line.startswith("update ")] for lines in self.lines]
        assert all(each == found[0] for each in found)
        return found[0]

    def last_lines(self) -> str:
        return "\n".join(f"{number}: {line}" for number, lines in enumerate(self.lines) for line in lines[-30:])


def _value(line: str) -> float:
    """Return the exact loss in the line of an update."""
    return float.fromhex(line.split()[-1])


def preempted(processes: int, devices: int, victim: int, done: int, cwd: Path) -> list[str]:
    """Resume the training after `done` updates, preempt one process, and return the losses until then."""
    training = Training(processes, devices, "steps=100000", cwd=cwd)
    training.wait_for(f"update {done + 3}:")
    training.processes[victim].send_signal(signal.SIGTERM)
    assert training.end() == [75] * processes, training.last_lines()
    losses = training.losses()
    saved = [re.findall(r"step (\d+) is saved", "\n".join(lines)) for lines in training.lines]
    assert saved == [[str(done + len(losses))]] * processes
    return losses


@pytest.mark.parametrize(
    ("processes", "victims", "others"), [(2, [1], 1), pytest.param(4, [2, 0], 2, marks=pytest.mark.nightly)]
)
def test_preempted_example_resumes_with_other_process_counts(
    tmp_path: Path, processes: int, victims: list[int], others: int
) -> None:
    cwd, devices = tmp_path / "interrupted", 8 // processes
    cwd.mkdir()
    losses: list[str] = []
    for victim in victims:
        losses += preempted(processes, devices, victim, len(losses), cwd)
    steps = len(losses) + 3
    last = Training(others, 8 // others, f"steps={steps}", cwd=cwd)
    assert last.end() == [0] * others, last.last_lines()
    (tmp_path / "whole").mkdir()
    whole = Training(processes, devices, f"steps={steps}", cwd=tmp_path / "whole")
    assert whole.end() == [0] * processes, whole.last_lines()
    assert losses == whole.losses()[:-3]
    same = [(_value(line), _value(other)) for line, other in zip(last.losses(), whole.losses()[-3:], strict=True)]
    # Another number of processes adds the same numbers in another order, which may change the last bit.
    assert [found for found, wanted in same] == pytest.approx([wanted for found, wanted in same], rel=1e-6, abs=0)
    for place in (cwd, tmp_path / "whole"):
        step = jct.load_checkpointables(place / "runs" / "lm" / f"step-{steps:010d}", {"data": None})
        assert step["data"]["state"] == {"next_index": steps}
