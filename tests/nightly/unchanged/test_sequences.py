"""Short versions of the campaigns with unchanged leaves, and controls: flaws that they find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.store import reuse
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.unchanged.deletions import Deletions
from tests.nightly.unchanged.sequences import Sequence, campaign

pytestmark = pytest.mark.timeout(300)

SEQUENCES = 40


@pytest.mark.parametrize("kind", [Sequence, Deletions])
def test_no_sequence_harms_a_step(tmp_path: Path, kind: type[Sequence]) -> None:
    problems, taken = campaign(SEQUENCES, 0, tmp_path, kind)
    assert problems == []
    assert taken > SEQUENCES * 10_000


def test_changed_array_that_is_taken_over_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse.Sources, "_changed", lambda self, blocks, stop: frozenset())
    problems, _ = campaign(SEQUENCES // 4, 0, tmp_path)
    assert any("AssertionError: step" in problem for problem in problems)


def test_symbolic_link_to_another_step_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(self: LocalBackend, source: str, target: str, size: int) -> bool:
        os.symlink(source, target)
        return True

    monkeypatch.setattr(LocalBackend, "clone", clone)
    problems, _ = campaign(SEQUENCES // 4, 0, tmp_path, Deletions)
    assert len(problems) > 1


def test_deletion_that_empties_files_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tree = local.remove_tree

    def empty_and_remove(path: str) -> Any:
        for folder, _, names in os.walk(path):
            for name in names:
                os.truncate(os.path.join(folder, name), 0)
        remove_tree(path)

    monkeypatch.setattr(local, "remove_tree", empty_and_remove)
    problems, _ = campaign(SEQUENCES // 4, 0, tmp_path, Deletions)
    assert any("has other files than before" in problem for problem in problems)
