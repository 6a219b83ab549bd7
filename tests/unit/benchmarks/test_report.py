"""Reports from recorded runs: tables, plots, the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import report, run
from benchmarks.cells import machine_lines
from benchmarks.record import Record, merge
from benchmarks.registry import ENTRIES
from tests.support.recorded_benchmark import record

PNG = b"\x89PNG"


def test_record_survives_its_file(tmp_path: Path) -> None:
    record("dense").write(tmp_path / "deep" / "run.json")
    assert Record.read(tmp_path / "deep" / "run.json") == record("dense")


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"old\.json: version 1"):
        Record.read(tmp_path / "old.json")


def test_runs_of_several_machines_are_merged() -> None:
    one, another = record("dense", "moe"), record("small")
    another.machine["processor"] = "another processor"
    merged = merge([one, another, record("moe")])
    assert list(merged.workloads) == ["dense", "moe", "small"]
    assert [names for _, names in merged.machines] == [["dense", "moe"], ["small"]]
    assert machine_lines(merged)[2].startswith("machine of small: 2 cores (another processor)")
    assert machine_lines(merge([one]))[0].startswith("machine: 2 cores (a processor)")
    assert merge([merged]).machines == merged.machines


def test_tables_plots_and_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plots need the bench extra")
    for name in ("dense", "small"):
        record(name).write(tmp_path / f"{name}.json")
    page = tmp_path / "page"
    report.main([str(tmp_path / "dense.json"), str(tmp_path / "small.json"), "--plots", str(page)])
    shown = capsys.readouterr().out
    assert "dense: save (4 arrays, 0.0 MB, 3 rounds)" in shown
    assert "left out: torch_save: no PyTorch environment" in shown
    assert [(page / name).read_bytes()[:4] for name in ("save.png", "load.png")] == [PNG, PNG]
    text = (page / "results.md").read_text()
    assert "python -m benchmarks.run --only dense\npython -m benchmarks.run --only small" in text
    assert "| peer | - | 1.000<br>0.500 .. 1.500 | 8.000<br>2.000 .. 9.000 | 3x<br>2 .. 4 |" in text
    assert "![save](save.png)" in text
    assert "2 cores (a processor), 24.0 GiB" in text


def test_a_subject_that_failed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record("dense")
    failed = dataclasses.replace(made.workloads["dense"], failed={"peer": "leaf a: 1 of 4 bytes differ"})
    Record(made.machine, {"dense": failed}).write(tmp_path / "run.json")
    report.main([str(tmp_path / "run.json")])
    assert "FAILED: peer: leaf a: 1 of 4 bytes differ" in capsys.readouterr().out


def test_skipped_subject_is_named_with_reason() -> None:
    found = run._left_out(["ours", "raw", "orbax_v0_no_ocdbt"], "moe")
    assert {"ours", "raw"}.isdisjoint(found)
    assert found["orbax_v0"] == "not selected"
    assert found["orbax_v0_no_ocdbt"].startswith("a variant")
    assert set(found) | {"ours", "raw"} == set(ENTRIES)
