"""The training of the tutorial is killed, asked to leave, and goes on each time, as the page says."""

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
from tests.support.pages import pages

# The same with fewer updates, and a line for each save, by which the test knows how far it is.
SHORTER = {
    "20_000": "1_000",
    "save_interval_steps=500": "save_interval_steps=100",
    "        ckpt(state, metrics=metrics)\n": "        if ckpt(state, metrics=metrics).saved:\n"
    "            print('saves', ckpt.completed_steps, flush=True)\n",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (page,) = (page for page in pages() if page.name == "docs/tutorial/getting-started.md")
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
    """Send it a signal when it saves a step; what it has printed by its end."""
    seen = ""
    with training:
        assert training.stdout is not None
        for line in training.stdout:
            seen += line
            if line == f"saves {step}\n":
                training.send_signal(number)
    return seen


def run_here(script: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Run it in this process, which knows JAX already; the bytes of what it has trained."""
    cwd.mkdir(exist_ok=True)
    monkeypatch.chdir(cwd)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    return np.asarray(names["state"]["w"]).tobytes()


def test_it_goes_on_after_a_kill_and_after_a_request_to_leave(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = start(script, tmp_path)
    assert "starting after 0 updates" in end_at(killed, 300, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL

    asked = start(script, tmp_path)
    told = end_at(asked, 600, signal.SIGTERM)
    (first,) = re.findall(r"^starting after (\d+) updates$", told, re.MULTILINE)
    assert int(first) in (200, 300)  # the save under way when it was killed may be committed or not
    assert re.search(r"took over from process \d+ on .*, which is dead", told)
    assert asked.returncode == 75

    resumed = run_here(script, tmp_path, monkeypatch)
    (went_on,) = re.findall(r"^starting after (\d+) updates$", capsys.readouterr().out, re.MULTILINE)
    assert int(went_on) >= 600
    assert resumed == run_here(script, tmp_path / "alone", monkeypatch)
