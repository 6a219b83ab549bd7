"""The manager in Orbax's form: a new process restores trees of Flax and Optax as Orbax does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.support.orbax_trees import LIBRARIES, TARGETS, TREES, described, save
from tests.support.paths import REPO_ROOT
from tests.support.tiers import nightly_after

SCRIPT = REPO_ROOT / "tests" / "support" / "orbax_trees.py"


@pytest.mark.parametrize("kind", nightly_after(1, TREES))
def test_fresh_process_restores_flax_trees_as_orbax(kind: str, tmp_path: Path, run_python: Any) -> None:
    for name, library in LIBRARIES.items():
        save(library, tmp_path / name, kind)
    done = run_python(SCRIPT, tmp_path, kind, check=True, fresh=True)
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()[-len(TARGETS) :]]
    for each in found:
        assert each["ours"] == each["orbax"]
        assert each["ours"] == described(TREES[kind](1))
