"""Steps that a live owner deletes or saves during an inspection are not reported as damage."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.cli import maintain as verify
from jaxckpt_train.inspection.health import health_of
from jaxckpt_train.inspection.runs import inspect_run
from jaxckpt_train.store.backends.base import Entry, Source
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.commands import json_of
from tests.support.runs import made_run, save_steps, step_path


class _Busy(LocalBackend):
    """A disk on which the owner acts right before a path is opened or listed for the `time`-th time."""

    def __init__(self, path: Path, time: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._path, self._left, self._act, self.acted = str(path), time, act, False

    def _count(self, path: str) -> None:
        self._left -= path == self._path
        if self._left == 0:
            self._left = -1
            self._act()
            self.acted = True

    def open(self, directory: str, name: str, **options: Any) -> Source:
        self._count(f"{directory}/{name}")
        return super().open(directory, name, **options)

    def list(self, path: str) -> list[Entry]:
        self._count(path)
        return super().list(path)


def hide(directory: Path, step: int) -> Callable[[], None]:
    """The first action of retention, which renames the step."""
    return lambda: step_path(directory, step).rename(directory / hidden_name(step)) and None


def hidden_name(step: int) -> str:
    """The name of an attempt by a dead process, which a step has while it is deleted."""
    return f".step-{step:010}.tmp-00000000-00000000-1-1-0"


@pytest.mark.parametrize("time", [1, 2])
def test_step_deleted_during_inspection_is_no_damage(tmp_path: Path, time: int) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    backend = _Busy(step_path(directory, 1) / "COMMIT", time, hide(directory, 1))
    found = inspect_run(backend, str(directory))
    assert backend.acted
    assert [status.problem for status in found] == [None] * len(found)
    assert [status.step for status in found][-2:] == [2, 3]


@pytest.mark.parametrize("time", [1, 2, 3])
def test_step_saved_during_inspection_is_no_damage(tmp_path: Path, time: int) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    step_path(directory, 3).rename(tmp_path / "new")
    backend = _Busy(directory, time, lambda: (tmp_path / "new").rename(step_path(directory, 3)) and None)
    found = inspect_run(backend, str(directory))
    assert backend.acted
    assert [status.problem for status in found] == [None] * len(found)


@pytest.mark.parametrize("time", range(1, 4))
def test_step_deleted_during_health_check_warns_nothing(tmp_path: Path, time: int) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        save_steps(manager, 1, 2, 3)
        backend = _Busy(step_path(tmp_path / "run", 3) / "COMMIT", time, hide(tmp_path / "run", 3))
        found = health_of(backend, str(tmp_path / "run"), datetime.datetime.now(datetime.UTC))
        assert found.warnings() == []
        assert backend.acted
        hidden = tmp_path / "run" / hidden_name(3)
        if hidden.exists():
            hidden.rename(step_path(tmp_path / "run", 3))


def test_deletions_of_live_owner_are_not_stale(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with jct.StepManager(directory) as manager:
        save_steps(manager, 1, 2)
        (directory / hidden_name(9)).mkdir()
        assert json_of("doctor", directory, "--size-mib", 0)["run"]["stale_files"] == []
    (directory / hidden_name(9)).mkdir(exist_ok=True)
    assert json_of("doctor", directory, "--size-mib", 0, code=1)["run"]["stale_files"] == [hidden_name(9)]


def test_scrub_omits_step_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    segment = step_path(directory, 1) / "state" / "p00000-s000.safetensors"
    monkeypatch.setattr(verify, "BACKEND", _Busy(segment, 1, hide(directory, 1)))
    found = json_of("scrub", directory)
    assert [each["name"] for each in found["steps"]] == [step_path(directory, step).name for step in (3, 2)]
    assert json.dumps(found).count("problem") == 2
