"""run_report.py: the page of a real training that was preempted and killed shows both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples import run_report
from jaxckpt_train.cli.main import app


def test_page_shows_preemption_and_kill(run_example: Any, tmp_path: Path) -> None:
    page, directory = tmp_path / "report.html", tmp_path / "training"
    options = ("--steps", "300", "--directory", str(directory), "--output", str(page))
    printed = run_example("run_report.py", *options, cwd=tmp_path)
    assert "SIGTERM after update 100: it left with 75" in printed
    assert "SIGKILL after update 200: it left with -9" in printed
    assert all(word in page.read_text() for word in ("preempted", "killed", "finished", "pinned", "loss"))
    found = json.loads(CliRunner().invoke(app, ["report", str(directory / "checkpoints"), "--json"]).stdout)
    assert [each["how"] for each in found["processes"]] == ["preempted", "killed", "finished"]
    assert [step["state"] for step in found["steps"] if step["pinned"]] == ["pinned"]
    assert found["metrics"]["loss"][-1]["step"] == 300


def test_training_that_fails_says_where_its_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "OPTIONS", ("no.such.key=1",))
    with pytest.raises(SystemExit, match=r"update 3 was not reached"):
        run_report.make_run(tmp_path, 9)
    assert "no" in (tmp_path / "log.txt").read_text()
