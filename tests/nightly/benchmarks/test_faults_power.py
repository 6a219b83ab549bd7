"""The benchmark of power cuts detects a subject that loses acknowledged saves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.faults_power import WHEN, power_cuts
from benchmarks.faults_trial import SUBJECTS
from tests.nightly.faults.loop_disk import loop_disk, why_not
from tests.nightly.faults.power_cut import When

pytestmark = pytest.mark.timeout(200)


class Unsynced:
    """A subject that writes one file without a sync."""

    def start_save(self, path: Path, state: Any) -> None:
        """Write all leaves."""
        with path.open("wb") as file:
            for leaf in jax.tree.leaves(state):
                np.save(file, np.asarray(leaf))

    def load(self, path: Path, target: Any) -> Any:
        """Read the leaves in their order."""
        with path.open("rb") as file:
            leaves = [np.load(file) for _ in jax.tree.leaves(target)]
        return jax.tree.unflatten(jax.tree.structure(target), leaves)


def ends_on(kind: str, folder: Path, subject: str, when: When, trials: int) -> dict[str, int]:
    """Count the outcomes of power cuts, in a new process: JAX hangs in a fork of a process that used it."""
    code = f"from {__name__} import cut; cut({kind!r}, {str(folder)!r}, {subject!r}, {when!r}, {trials})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def cut(kind: str, folder: str, subject: str, when: When, trials: int) -> None:
    subjects: dict[str, Callable[[], Any]] = {**SUBJECTS, "unsynced": Unsynced}
    with pytest.MonkeyPatch.context() as patch, loop_disk(Path(folder), kind) as disk:
        patch.setattr("benchmarks.faults_power.SUBJECTS", subjects)
        print(json.dumps(power_cuts(subject, when, trials, 0, disk).ends))


@pytest.fixture(params=["ext4", "xfs"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    reason = why_not(found)
    if reason is not None:
        pytest.skip(f"no {found} whose power can be cut: {reason}")
    return found


@pytest.mark.parametrize("when", WHEN)
def test_ours_keeps_acknowledged_saves(kind: str, tmp_path: Path, when: When) -> None:
    assert ends_on(kind, tmp_path, "ours", when, 3) == {"right": 3}


@pytest.mark.parametrize("when", WHEN)
def test_subject_without_sync_loses_saves(kind: str, tmp_path: Path, when: When) -> None:
    ends = ends_on(kind, tmp_path, "unsynced", when, 2)
    assert sum(count for end, count in ends.items() if end.startswith("lost")) >= 1
