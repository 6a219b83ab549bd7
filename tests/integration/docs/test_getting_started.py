"""The training of the tutorial resumes after a kill and after a preemption, as the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import REPO_ROOT
from tests.support.pages import Page, pages

# Fewer updates, and a line for each save, which tells the test how far the training is.
SHORTER = {
    "20_000": "1_000",
    "save_interval_steps=500": "save_interval_steps=100",
    "        ckpt(state, metrics=metrics)\n": "        if ckpt(state, metrics=metrics).saved:\n"
    "            print('saves', ckpt.completed_steps, flush=True)\n",
}


@pytest.fixture(scope="module")
def page() -> Page:
    (found,) = (page for page in pages() if page.name == "docs/tutorial/getting-started.md")
    return found


@pytest.fixture(scope="module")
def script(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = page.blocks("python")[0].text
    for old, new in SHORTER.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = tmp_path_factory.mktemp("getting-started") / "train.py"
    file.write_text(text)
    return file


def start(script: Path, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_at(training: subprocess.Popen[str], step: int, number: signal.Signals) -> str:
    """Send the training a signal when it saves a step, and return its output."""
    seen = ""
    with training:
        assert training.stdout is not None
        for line in training.stdout:
            seen += line
            if line == f"saves {step}\n":
                training.send_signal(number)
    return seen


def run_here(script: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Run the training in this process, which has imported JAX already, and return the bytes of its result."""
    cwd.mkdir(exist_ok=True)
    monkeypatch.chdir(cwd)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    return np.asarray(names["state"]["w"]).tobytes()


def test_tutorial_resumes_after_kill_and_signal(
    page: Page, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = start(script, tmp_path)
    assert "starting after 0 updates" in end_at(killed, 300, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL

    asked = start(script, tmp_path)
    output = end_at(asked, 600, signal.SIGTERM)
    (first,) = re.findall(r"^starting after (\d+) updates$", output, re.MULTILINE)
    assert int(first) in (200, 300)  # the save that was running at the kill may be committed or not
    assert re.search(r"took over from process \d+ on .*, which is dead", output)
    assert asked.returncode == 75

    resumed = run_here(script, tmp_path, monkeypatch)
    (later,) = re.findall(r"^starting after (\d+) updates$", capsys.readouterr().out, re.MULTILINE)
    assert int(later) >= 600
    exec(page.blocks("python")[1].text.replace("step-0000020000", "step-0000001000"), {})
    assert resumed == run_here(script, tmp_path / "alone", monkeypatch)
