"""benchmarks.goodput: a short run of real processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import goodput
from benchmarks.goodput_attempt import AttemptFailedError, run_attempt
from benchmarks.goodput_kills import Kill
from benchmarks.goodput_losses import Losses
from benchmarks.goodput_subjects import SUBJECTS
from benchmarks.goodput_summary import as_goodput
from benchmarks.goodput_training import Arguments
from benchmarks.lm_training import QUICK

UPDATES, LONGEST_S = 40, 200.0  # a busy machine may need a minute to start a process, and as long for a save


def arguments(folder: Path, subject: str, number: int, most_updates: int | None = None) -> Arguments:
    return Arguments(
        subject=subject,
        directory=str(folder / subject),
        log=str(folder / f"{subject}-{number}.log"),
        cache=str(folder / "cache"),
        size=dict(QUICK),
        interval_steps=4,
        interval_s=0.01,
        most_updates=most_updates,
        grace_s=LONGEST_S,
    )


def test_unexpected_exit_code_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AttemptFailedError, match="ours_nothing left with 1"):
        run_attempt(arguments(tmp_path, "ours_nothing", 0), None, 60.0)


def test_command_measures_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page = tmp_path / "out.json", tmp_path / "page"
    options = ["--quick", "--subjects", "ours_fixed", "--seconds", "4", "--mean-s", "18", "--every-s", "0.2"]
    goodput.main([*options, "--dir", str(tmp_path / "work"), "--json", str(json_file), "--page", str(page)])
    assert "useful time" in capsys.readouterr().out
    results = json.loads(json_file.read_text(encoding="utf-8"))["results"]
    found = as_goodput(results["goodput"]["ours_fixed"])
    assert 0 <= found.useful <= found.done
    assert found.wall_s == pytest.approx(sum(dataclasses.astuple(found.where)))
    assert results["conflicts"] == []
    assert (page / "goodput.md").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", [name for name, is_default in SUBJECTS.items() if is_default])
def test_each_subject_resumes_from_its_save(tmp_path: Path, subject: str) -> None:
    losses = Losses()
    losses.add("nothing", run_attempt(arguments(tmp_path, "nothing", 0, most_updates=UPDATES), None, LONGEST_S))
    ask = Kill(12.0, asks=True)
    asked = run_attempt(arguments(tmp_path, subject, 1), ask, LONGEST_S, least_updates=10 * UPDATES)
    losses.add(subject, asked)
    after = run_attempt(arguments(tmp_path, subject, 2, most_updates=1), None, LONGEST_S)
    losses.add(subject, after)
    assert losses.conflicts == []
    assert losses.compared >= UPDATES
    assert after.record.restored == asked.record.updates[-1].number
