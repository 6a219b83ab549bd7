"""Jobs of workers: the samples of several processes become one."""

from __future__ import annotations

import dataclasses
import json

from benchmarks.cells import tables
from benchmarks.job_samples import load_of_job, save_of_job
from benchmarks.job_workloads import COLUMNS, FEW, MANY, MORE, REPLICATED_JOB, ROWS, job_workloads
from benchmarks.record import Turn
from benchmarks.registry import JOBS, why_not
from benchmarks.sample import Resident
from benchmarks.spread import Spread
from benchmarks.subject_ours import why_no_variant
from benchmarks.summary import summarise
from benchmarks.workloads import SAVED, WHOLE, Workload
from tests.support.recorded_benchmark import load_sample, save_sample, workload_record


def test_job_save_spans_first_start_to_last_end() -> None:
    first = dataclasses.replace(save_sample(2.0, plain_s=1.0, blocking_s=0.5), began_s=10.0, written_bytes=(30,))
    second = dataclasses.replace(save_sample(2.5, plain_s=1.5, blocking_s=0.1), began_s=9.75, written_bytes=(10,))
    made = save_of_job([first, second])
    assert (made.blocking_s, made.finished_s, made.durable_s) == (0.75, 1.5, 2.5)
    assert (made.blocking_cpu_s, made.durable_cpu_s) == (0.6, 4.5)
    assert made.written_bytes == (30, 10)
    assert made.resident == Resident(before=200, peak=700, final=600)
    assert (made.stored_bytes, made.stored_files) == (1000, 3)
    assert save_of_job([first, dataclasses.replace(second, blocking_s=None)]).blocking_s is None


def test_job_load_sums_reads_of_processes() -> None:
    first = dataclasses.replace(load_sample("ours", 2.0, stolen_s=0.1, was_mapped=False), began_s=5.0, read_bytes=700)
    second = dataclasses.replace(load_sample("ours", 1.0, stolen_s=0.3, was_mapped=True), began_s=6.5, read_bytes=900)
    made = load_of_job([first, second])
    assert (made.load_s, made.load_cpu_s) == (2.5, 3.0)
    assert (made.read_bytes, made.disk_bytes, made.asked_bytes) == (1600, 2400, 1000)
    assert made.notes == {"caches": "drop_caches", "stolen_s": 0.3, "was_mapped": True}
    assert load_of_job([first, dataclasses.replace(second, read_bytes=None)]).read_bytes is None


def test_summary_has_largest_writer_and_read_ratio() -> None:
    save = dataclasses.replace(save_sample(1.0), written_bytes=(30, 10, 10))
    load = dataclasses.replace(load_sample("ours", 1.0), read_bytes=4000)
    summary = summarise([Turn(1, "ours", save, [load])])
    assert summary.saves["ours"]["largest_share"] == Spread(0.6, 0.6, 0.6)
    assert summary.loads["whole"]["ours"]["reads_by_asked"] == Spread(4.0, 4.0, 4.0)
    record = dataclasses.replace(workload_record("rows_2"), processes=2)
    saved, loaded = tables(record, summary)
    assert ("2 processes" in saved.title, saved.headings[-1], saved.rows[0][-1]) == (True, "most by one", "60 %")
    assert (loaded.headings[-2:], loaded.rows[0][-2:]) == (("read", "from disk"), ("400 %", "120 %"))


def test_held_bytes_count_replicas() -> None:
    made = job_workloads(False)
    assert tuple(made) == JOBS
    assert {workload.nbytes for workload in made.values()} == {1 << 30}
    assert [made[ROWS[processes]].devices for processes in (FEW, MORE, MANY)] == [2, 4, 8]
    assert made[REPLICATED_JOB].held_bytes(SAVED) == made[REPLICATED_JOB].held_bytes(WHOLE) == 4 << 30
    assert {made[ROWS[MORE]].held_bytes(target) for target in (SAVED, WHOLE, COLUMNS)} == {1 << 30}
    assert Workload.from_json(json.loads(json.dumps(dataclasses.asdict(made[REPLICATED_JOB])))) == made[REPLICATED_JOB]


def test_variants_run_only_where_they_differ() -> None:
    assert "no_such_setting" in (why_no_variant("no_such_setting", True) or "")
    assert "default" in (why_no_variant("verify_on_load", True) or "")
    assert why_no_variant("verify_on_load", False) is None
    assert "default" in (why_no_variant("direct_io", True, "auto") or "")
    assert "needs replicas" in (why_not("orbax_v0_broadcast", ROWS[MORE]) or "")
    assert why_not("orbax_v0_broadcast", REPLICATED_JOB) is None
