"""A fresh run is refused next to steps of Levanter or TorchTitan, but not next to other folders with such names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager
from tests.support.file_content import content
from tests.support.runs import made_run, state_of


def levanter(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"step": 5, "timestamp": "2025-01-01T00:00:00"}))
    (folder / "model" / "w").mkdir(parents=True)


def torchtitan(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"\x80\x04N.")
    (folder / "__0_0.distcp").write_bytes(b"1234")


def cut_off(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"12")


def fresh(directory: Path, **options: Any) -> None:
    with jct.CheckpointCallback(directory, save_interval_steps=1, **options) as ckpt:
        ckpt.resume(state_of(0))
        ckpt(state_of(1))


@pytest.mark.parametrize(
    ("make", "tool"), [(levanter, "Levanter"), (torchtitan, "TorchTitan"), (cut_off, "TorchTitan")]
)
def test_fresh_run_next_to_foreign_steps_is_refused(tmp_path: Path, make: Any, tool: str) -> None:
    jct.save(tmp_path / "pretrained", state_of(7))
    run = tmp_path / "run"
    for name in ("step-900", "step-1000"):
        make(run / name)
    before = content(run)
    for options in ({}, {"init_from": tmp_path / "pretrained"}):
        with pytest.raises(jct.SettingsError, match=rf"steps of {tool}, .*step-900, step-1000"):
            fresh(run, **options)
    with pytest.raises(jct.SettingsError, match=tool):
        orbax_manager.CheckpointManager(run)
    with pytest.raises(jct.StepNotFoundError, match=tool):
        jct.StepManager(run).restore()
    assert {name: data for name, data in content(run).items() if name.startswith("step-")} == {
        name: data for name, data in before.items() if name.startswith("step-")
    }


def test_incomplete_newest_step_does_not_hide_others(tmp_path: Path) -> None:
    levanter(tmp_path / "step-10")
    (tmp_path / "step-20").mkdir()
    with pytest.raises(jct.SettingsError, match="Levanter"):
        fresh(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1, 2]", "not JSON", '{"step": 3}'])
def test_unrelated_folders_with_step_names_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "metadata.json").write_text(text)
    (tmp_path / "step-4").write_text("a file")
    fresh(tmp_path)
    assert jct.StepManager(tmp_path).steps == [1]


def test_existing_run_continues_next_to_foreign_steps(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    torchtitan(tmp_path / "step-900")
    with jct.CheckpointCallback(tmp_path) as ckpt:
        assert int(ckpt.resume(state_of(0))["step"]) == 3
