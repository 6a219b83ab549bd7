"""Jobs of workers: one sample of several, that whoever returns something else is caught, and what is counted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import jobs
from benchmarks.cells import tables
from benchmarks.job_process import WorkerJob
from benchmarks.job_samples import load_of_job, save_of_job
from benchmarks.job_workloads import COLUMNS, FEW, MANY, MORE, REPLICATED_JOB, ROWS, job_workloads
from benchmarks.leaf import Leaf
from benchmarks.record import Turn
from benchmarks.registry import JOBS, why_not
from benchmarks.rounds import Plan, run_rounds, worker
from benchmarks.sample import Resident
from benchmarks.spread import Spread
from benchmarks.subject_ours import why_no_variant
from benchmarks.summary import summarise
from benchmarks.workloads import SAVED, WHOLE, Workload
from tests.support.fake_subjects import DYING_IN_ONE, HONEST_IN_JOB, OURS_COUNTED, WRONG_IN_ONE
from tests.support.recorded_benchmark import load_sample, save_sample, workload_record

TINY_JOB = Workload(
    "tiny_job", (Leaf(("params", "a"), (8, 16), spec=("x",)), Leaf(("params", "b"), (6,))), (2, 1), processes=2
)
SHARED = Workload("shared", (Leaf(("a",), (2048, 1024), "int32"), Leaf(("b",), (600,))), (2, 1), processes=2)
SEED = (1, 2, 3)
COUNTED_APART_BYTES = 1 << 18  # manifests, headers, directories and whole pages


def test_a_save_of_a_job_lasts_from_the_first_that_began_to_the_last_that_ended() -> None:
    first = dataclasses.replace(save_sample(2.0, plain_s=1.0, blocking_s=0.5), began_s=10.0, written_bytes=(30,))
    second = dataclasses.replace(save_sample(2.5, plain_s=1.5, blocking_s=0.1), began_s=9.75, written_bytes=(10,))
    made = save_of_job([first, second])
    assert (made.blocking_s, made.finished_s, made.durable_s) == (0.75, 1.5, 2.5)
    assert (made.blocking_cpu_s, made.durable_cpu_s) == (0.6, 4.5)
    assert made.written_bytes == (30, 10)
    assert made.resident == Resident(before=200, peak=700, final=600)
    assert (made.stored_bytes, made.stored_files) == (1000, 3)
    assert save_of_job([first, dataclasses.replace(second, blocking_s=None)]).blocking_s is None


def test_a_load_of_a_job_adds_up_what_was_read_and_counts_once_what_was_asked_for() -> None:
    first = dataclasses.replace(load_sample("ours", 2.0, stolen_s=0.1, was_mapped=False), began_s=5.0, read_bytes=700)
    second = dataclasses.replace(load_sample("ours", 1.0, stolen_s=0.3, was_mapped=True), began_s=6.5, read_bytes=900)
    made = load_of_job([first, second])
    assert (made.load_s, made.load_cpu_s) == (2.5, 3.0)
    assert (made.read_bytes, made.disk_bytes, made.asked_bytes) == (1600, 2400, 1000)
    assert made.notes == {"caches": "drop_caches", "stolen_s": 0.3, "was_mapped": True}
    assert load_of_job([first, dataclasses.replace(second, read_bytes=None)]).read_bytes is None


def test_the_summary_tells_the_largest_writer_and_how_often_each_byte_was_read() -> None:
    save = dataclasses.replace(save_sample(1.0), written_bytes=(30, 10, 10))
    load = dataclasses.replace(load_sample("ours", 1.0), read_bytes=4000)
    summary = summarise([Turn(1, "ours", save, [load])])
    assert summary.saves["ours"]["largest_share"] == Spread(0.6, 0.6, 0.6)
    assert summary.loads["whole"]["ours"]["reads_by_asked"] == Spread(4.0, 4.0, 4.0)
    record = dataclasses.replace(workload_record("rows_2"), processes=2)
    saved, loaded = tables(record, summary)
    assert ("2 processes" in saved.title, saved.headings[-1], saved.rows[0][-1]) == (True, "most by one", "60 %")
    assert (loaded.headings[-2:], loaded.rows[0][-2:]) == (("read", "from disk"), ("400 %", "120 %"))


def test_workloads_hold_as_much_as_their_replicas_take() -> None:
    made = job_workloads(False)
    assert tuple(made) == JOBS
    assert {workload.nbytes for workload in made.values()} == {1 << 30}
    assert [made[ROWS[processes]].devices for processes in (FEW, MORE, MANY)] == [2, 4, 8]
    assert made[REPLICATED_JOB].held_bytes(SAVED) == made[REPLICATED_JOB].held_bytes(WHOLE) == 4 << 30
    assert {made[ROWS[MORE]].held_bytes(target) for target in (SAVED, WHOLE, COLUMNS)} == {1 << 30}
    assert Workload.from_json(json.loads(json.dumps(dataclasses.asdict(made[REPLICATED_JOB])))) == made[REPLICATED_JOB]


def test_a_variant_of_ours_has_a_turn_where_it_is_another_one() -> None:
    assert why_no_variant("no_such_setting", True) == "this version has no setting no_such_setting"
    assert why_no_variant("verify_on_load", True) == "is what ours does by default"
    assert why_no_variant("verify_on_load", False) is None
    assert why_no_variant("direct_io", True, "auto") == "is what ours does by default"
    assert why_not("orbax_v0_broadcast", ROWS[MORE]) == "needs replicas, of which one reads"
    assert why_not("orbax_v0_broadcast", REPLICATED_JOB) is None


def test_an_honest_library_passes_and_who_errs_or_dies_in_one_process_is_caught(tmp_path: Path) -> None:
    plan = Plan(counted_rounds=1, seed=1, fresh_loads=False, report=lambda line: None)
    outcome = run_rounds(TINY_JOB, [HONEST_IN_JOB, WRONG_IN_ONE, DYING_IN_ONE], tmp_path, plan)
    assert [(turn.round, turn.subject) for turn in outcome.turns] == [(0, HONEST_IN_JOB), (1, HONEST_IN_JOB)]
    assert "leaf params/a: 1 of 256 bytes differ" in outcome.failed[WRONG_IN_ONE]
    assert "the worker died" in outcome.failed[DYING_IN_ONE]


def test_what_ours_writes_and_reads_is_counted_as_it_tells_itself(tmp_path: Path) -> None:
    with worker(OURS_COUNTED, SHARED, tmp_path / "log") as running:
        assert isinstance(running, WorkerJob)
        save = running.save(tmp_path / "one", SEED)
        (load,) = running.load(tmp_path / "one", SEED, WHOLE)
    assert len(save.written_bytes) == 2
    assert max(save.written_bytes) < 0.55 * sum(save.written_bytes)
    assert SHARED.nbytes <= sum(save.written_bytes) <= SHARED.nbytes + COUNTED_APART_BYTES
    told = sum(int((tmp_path / f"count-{number}").read_text()) for number in range(2))
    assert load.read_bytes is not None
    assert told <= load.read_bytes <= told + COUNTED_APART_BYTES


def test_the_command_measures_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "work"), "--json", str(tmp_path / "jobs.json"), "--page", str(tmp_path / "page")]
    jobs.main(["--quick", "--rounds", "1", "--only", ROWS[FEW], "--subjects", "raw,orbax_v0,ours", *where])
    page = (tmp_path / "page" / "jobs.md").read_text()
    assert page.startswith("# Multi-process jobs")
    for subject in ("raw", "orbax_v0", "ours"):
        assert f"\n| {subject} |" in page
    assert "rows_2: load" in capsys.readouterr().out
    assert not (tmp_path / "page" / "results.md").exists()
