"""Jobs of workers: counted bytes, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import jobs
from benchmarks.job_process import WorkerJob
from benchmarks.job_workloads import FEW, ROWS
from benchmarks.leaf import Leaf
from benchmarks.rounds import worker
from benchmarks.workloads import WHOLE, Workload
from tests.support.fake_subjects import OURS_COUNTED

SHARED = Workload("shared", (Leaf(("a",), (2048, 1024), "int32"), Leaf(("b",), (600,))), (2, 1), processes=2)
SEED = (1, 2, 3)
COUNTED_APART_BYTES = 1 << 18  # manifests, headers, directories and whole pages


@pytest.mark.nightly
def test_ours_reports_the_counted_bytes(tmp_path: Path) -> None:
    with worker(OURS_COUNTED, SHARED, tmp_path / "log") as running:
        assert isinstance(running, WorkerJob)
        save = running.save(tmp_path / "one", SEED)
        (load,) = running.load(tmp_path / "one", SEED, WHOLE)
    assert len(save.written_bytes) == 2
    assert max(save.written_bytes) < 0.55 * sum(save.written_bytes)
    assert SHARED.nbytes <= sum(save.written_bytes) <= SHARED.nbytes + COUNTED_APART_BYTES
    reported = sum(int((tmp_path / f"count-{number}").read_text()) for number in range(2))
    assert load.read_bytes is not None
    assert reported <= load.read_bytes <= reported + COUNTED_APART_BYTES


@pytest.mark.nightly
def test_command_measures_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "work"), "--json", str(tmp_path / "jobs.json"), "--page", str(tmp_path / "page")]
    jobs.main(["--quick", "--rounds", "1", "--only", ROWS[FEW], "--subjects", "raw,orbax_v0,ours", *where])
    page = (tmp_path / "page" / "jobs.md").read_text()
    assert page.startswith("# Multi-process jobs")
    for subject in ("raw", "orbax_v0", "ours"):
        assert f"\n| {subject} |" in page
    assert "rows_2: load" in capsys.readouterr().out
    assert not (tmp_path / "page" / "results.md").exists()
