"""The bench of power cuts tells a subject that keeps what it acknowledged from one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.faults_power import WHEN, power_cuts
from benchmarks.faults_trial import SUBJECTS
from tests.faults.loop_disk import LoopDisk, loop_disk, why_not
from tests.faults.power_cut import When

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:.*fork")]


class Unsynced:
    """Writes one file, and syncs nothing."""

    def start_save(self, path: Path, state: Any) -> None:
        """All of it."""
        with path.open("wb") as file:
            for leaf in jax.tree.leaves(state):
                np.save(file, np.asarray(leaf))

    def load(self, path: Path, target: Any) -> Any:
        """In the order of the leaves."""
        with path.open("rb") as file:
            leaves = [np.load(file) for _ in jax.tree.leaves(target)]
        return jax.tree.unflatten(jax.tree.structure(target), leaves)


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDisk]:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"no {request.param} whose power can be cut: {reason}")
    with loop_disk(tmp_path, request.param) as made:
        yield made


@pytest.mark.parametrize("when", WHEN)
def test_ours_keeps_what_it_acknowledged(disk: LoopDisk, when: When) -> None:
    assert power_cuts("ours", when, 3, 0, disk).ends == {"right": 3}


@pytest.mark.parametrize("when", WHEN)
def test_a_subject_that_syncs_nothing_is_found_out(disk: LoopDisk, when: When, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects: dict[str, Callable[[], Any]] = {"unsynced": Unsynced}
    monkeypatch.setattr("benchmarks.faults_power.SUBJECTS", {**SUBJECTS, **subjects})
    ends = power_cuts("unsynced", when, 2, 0, disk).ends
    assert sum(count for end, count in ends.items() if end.startswith("lost")) == 2
