"""The benchmark of object stores: its tables, its goals, and arguments that it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import objects, objects_report

MIB = 1 << 20
ROUND = ["get", "put_create", "put_update"]
RESULTS: dict[str, Any] = {
    "command": "python -m benchmarks.objects --mib 64",
    "server": "versitygw 1.8.0",
    "versions": {"obstore": "0.12.1"},
    "size": {"mib": 64, "arrays": 16, "small_arrays": 1000, "small_bytes": 2000, "steps": 1000},
    "settings": {"part_bytes": 8 * MIB, "concurrency": 6, "staging_bytes": 96 * MIB},
    "speed": {
        "put_by_obstore": [{"seconds": each} for each in (1.5, 2.0, 4.0)],
        "save_by_us": [{"seconds": each, "blocked_s": 0.0025} for each in (2.0, 2.0, 2.0)],
        "get_by_obstore": [{"seconds": each} for each in (1.0, 1.0, 1.0)],
        "load_by_us": [{"seconds": each} for each in (1.0, 2.0, 4.0)],
        "restore_by_us": [{"seconds": each} for each in (2.0, 4.0, 8.0)],
    },
    "memory": {
        "save": [{"peak_bytes": each * MIB} for each in (300, 350, 361)],
        "no save": [{"peak_bytes": each * MIB} for each in (200, 200, 200)],
    },
    "small": [{"seconds": 0.1, "blocked_s": 0.01}],
    "requests": {"save of small arrays": [ROUND * 4, ROUND * 2], "manager": [["get"] * 4], "callback": [["get"] * 9]},
}
PEERS = {
    "network": {"latency_s": 0.1, "bytes_per_s": 200e6},
    "dcp": {
        "versions": {"torch": "2.9.1", "s3fs": "2026.2"},
        "options": {"DCP, tuned": {"writer": {"thread_count": 8}, "s3fs in a save": {"default_block_size": 9}}},
        "seconds": {
            "save": {"ours": [1.2, 2.0], "DCP, defaults": [9.0, 5.0], "DCP, tuned": [3.0, 6.0]},
            "load": {"ours": [2.0, 2.0], "DCP, defaults": [4.5, 3.0], "DCP, tuned": [4.0, 3.5]},
        },
    },
    "orbax": {"left_out": "gcsfs is not installed"},
}
MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_bytes": 1 << 30,
    "kernel": "6",
    "file_system": "ext4",
    "device": "/dev/vda",
    "commit": "abc",
    "load_average_1min": 0.25,
    "python": "3.11",
    "jax": "0.10",
    "numpy": "2.4",
    "orbax-checkpoint": "0.12",
}


def goals(results: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found, and whether it meets the goal."""
    return [(row[1], row[3]) for row in objects_report.tables(results)[0].rows]


def test_goals_are_about_medians_of_times_and_the_worst_of_others() -> None:
    assert goals(RESULTS) == [
        ("1.00\n0.75 .. 2.00", "met"),
        ("0.50\n0.25 .. 1.00", "MISSED"),
        ("2.50", "met"),
        ("150\n100 .. 161", "MISSED"),
        ("9\n6 .. 12", "met"),
        ("4", "met"),
    ]


def test_resume_that_lists_misses_its_goal() -> None:
    results = copy.deepcopy(RESULTS)
    results["requests"]["manager"].append(["get", "list"])
    assert goals(results)[-1][1] == "MISSED"


def test_times_are_compared_with_obstore() -> None:
    times = objects_report.tables(RESULTS)[1]
    assert times.rows[0] == ("save, obstore alone", "2.00\n1.50 .. 4.00", "32", "")
    assert times.rows[1] == ("save, ours", "2", "32", "1.00\n0.75 .. 2.00")


def test_each_variant_of_dcp_has_goals() -> None:
    assert goals(RESULTS | {"peers": PEERS})[-4:] == [
        ("5.00\n2.50 .. 7.50", "met"),
        ("2.75\n2.50 .. 3.00", "met"),
        ("1.88\n1.50 .. 2.25", "MISSED"),
        ("1.88\n1.75 .. 2.00", "MISSED"),
    ]


def test_peers_have_tables_or_reasons(tmp_path: Path) -> None:
    results = RESULTS | {"peers": PEERS}
    *_, times = objects_report.tables(results)
    assert times.rows[0] == ("save, ours", "1.60\n1.20 .. 2.00", "40", "")
    assert times.rows[2] == ("save, DCP, tuned", "4\n3 .. 6", "14", "2.75\n2.50 .. 3.00")
    assert "100 ms and 200 MB/s" in times.title
    objects_report.write(tmp_path, MACHINE, results)
    page = (tmp_path / objects_report.PAGE).read_text()
    for part in ("torch 2.9.1", "thread_count=8; s3fs in a save: default_block_size=9", "left out: Orbax: gcsfs"):
        assert part in page


def test_page_has_machine_versions_and_command(tmp_path: Path) -> None:
    objects_report.write(tmp_path, MACHINE, RESULTS)
    page = (tmp_path / objects_report.PAGE).read_text()
    for part in ("a processor", "versitygw 1.8.0", "obstore 0.12.1", RESULTS["command"], "9 get"):
        assert part in page


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--rounds", "4"], "at least 5, found 4"),
        (["--quick", "--rounds", "0"], "at least 1, found 0"),
        (["--mib", "100"], "a multiple of 16"),
        (["--mib", "0"], "a multiple of 16"),
        (["--server", "s3rver"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        objects.main([*arguments, "--dir", str(tmp_path)])
    assert error.value.code == 2
    assert found in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
