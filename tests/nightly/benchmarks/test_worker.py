"""The worker protocol: its measurements, and a library that returns other bytes is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaf import Leaf
from benchmarks.rounds import Plan, SaveFuture, run_rounds, worker
from benchmarks.sample import LoadSample
from benchmarks.worker_process import Worker, WorkerError
from benchmarks.workloads import Workload
from tests.support.fake_subjects import DYING, FORGETFUL, HONEST, TINY, WRONG_BYTES
from tests.support.tiers import nightly_after

SEED = (1, 2, 3)
MESHED = Workload(
    "meshed",
    (Leaf(("params", "a"), (16, 32), spec=("x", "y")), Leaf(("opt", "b"), (16,), "bfloat16", ("x+y",))),
    (4, 2),
    ("8x1", "2x1", "replicated", "params"),
)


def save_and_load(running: Worker, folder: Path, workload: Workload) -> list[LoadSample]:
    running.save(folder / "one", SEED)
    return [sample for target in workload.targets for sample in running.load(folder / "one", SEED, target)]


def rounds(subjects: list[str], folder: Path, *, fresh_loads: bool = False) -> SaveFuture:
    lines: list[str] = []
    plan = Plan(counted_rounds=1, seed=1, fresh_loads=fresh_loads, report=lines.append)
    outcome = run_rounds(TINY, subjects, folder, plan)
    assert len(lines) == len(outcome.turns) + len(outcome.failed)
    return outcome


def test_ours_loads_meshes_and_parts(tmp_path: Path) -> None:
    with worker("ours", MESHED, tmp_path / "log") as running:
        save = running.save(tmp_path / "first", SEED)
        assert save.blocking_s is not None
        assert 0 < save.blocking_s < save.finished_s <= save.durable_s
        assert save.stored_bytes > MESHED.nbytes
        assert save.resident.peak >= save.resident.before
        loads = save_and_load(running, tmp_path, MESHED)
        assert [load.target for load in loads] == list(MESHED.targets)
        assert [load.asked_bytes for load in loads] == [*[MESHED.nbytes] * 3, 4 * 16 * 32]


@pytest.mark.parametrize("subject", nightly_after(1, ["raw", "memcpy"]))
def test_raw_and_memcpy_have_their_rows(subject: str, tmp_path: Path) -> None:
    with worker(subject, MESHED, tmp_path / "log") as running:
        loads = save_and_load(running, tmp_path, MESHED)
    rows = ["raw", "raw_fresh"] if subject == "raw" else ["memcpy"]
    assert [load.row for load in loads] == rows * len(MESHED.targets)


def test_honest_library_passes_others_are_caught(tmp_path: Path) -> None:
    outcome = rounds([HONEST, WRONG_BYTES, FORGETFUL, DYING], tmp_path)
    assert [(turn.round, turn.subject) for turn in outcome.turns] == [(0, HONEST), (1, HONEST)]
    assert "leaf params/b: 1 of 12 bytes differ" in outcome.failed[WRONG_BYTES]
    assert outcome.versions.keys() == {"python", "numpy"}
    assert "missing leaves ['params/a']" in outcome.failed[FORGETFUL]
    assert "the worker died: last words" in outcome.failed[DYING]


def test_missing_library_is_left_out(tmp_path: Path) -> None:
    outcome = rounds(["tests.benchmarks.no_such_module:Subject"], tmp_path)
    assert "ModuleNotFoundError" in next(iter(outcome.failed.values()))


@pytest.mark.nightly
def test_fresh_loads_leave_no_directory_behind(tmp_path: Path) -> None:
    outcome = rounds([HONEST], tmp_path, fresh_loads=True)
    assert len(outcome.turns) == 2
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_another_seed_makes_another_tree(tmp_path: Path) -> None:
    with worker(HONEST, TINY, tmp_path / "log") as running:
        running.save(tmp_path / "one", SEED)
        with pytest.raises(WorkerError, match="bytes differ"):
            running.load(tmp_path / "one", (*SEED, 4), "whole")
