"""The short version of the campaign that damages shared files, and controls: flaws that it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import verify
from tests.nightly.unchanged.shared_damage import IN_PLACE, KINDS, campaign

pytestmark = pytest.mark.timeout(300)

TRIALS = 200


def test_damage_is_found_in_each_step_that_has_the_file(tmp_path: Path) -> None:
    found = campaign(TRIALS, 0, tmp_path)
    assert found.problems == []
    assert all(found.counts[kind] > 5 for kind in KINDS)
    assert all(found.counts[f"{kind}, without links"] > 1 for kind in KINDS)
    assert found.counts["damaged steps"] > 1.5 * TRIALS
    assert found.counts["restored an older step"] > TRIALS // 8
    assert found.counts["continued"] > TRIALS // 20


def test_load_without_digests_is_detected(tmp_path: Path) -> None:
    found = campaign(TRIALS // 4, 0, tmp_path, StoreSettings(verify_on_load=False, io_threads=1))
    assert any("is loaded, and wrong" in problem for problem in found.problems)
    assert any("the restore did not give step" in problem for problem in found.problems)


def test_trust_in_any_shared_file_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has(self: verify.IntactFiles, source: Any, expected: bytes) -> bool:
        return source.identity is not None

    monkeypatch.setattr(verify.IntactFiles, "has", has)
    problems = campaign(TRIALS // 4, 0, tmp_path).problems
    assert any("a verification of the run is wrong about a damaged step" in problem for problem in problems)


def test_restore_that_tries_two_steps_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = RunDirectory.candidates

    def two(self: RunDirectory, step: int | None, **options: Any) -> list[Entry]:
        return candidates(self, step, **options)[:2]

    monkeypatch.setattr(RunDirectory, "candidates", two)
    problems = campaign(TRIALS // 4, 0, tmp_path).problems
    assert any("the restore raised" in problem for problem in problems)
    assert all(any(kind in problem for kind in IN_PLACE) for problem in problems)
