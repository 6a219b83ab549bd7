"""benchmarks.fast_tier_goodput: its kills, the steps that it counts, and its table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import fast_tier_goodput
from benchmarks.fast_tier_goodput import HOSTS, committed, lives
from benchmarks.goodput_facts import Facts
from benchmarks.goodput_summary import goodput_of

FACTS = Facts(10.0, 1.0, 2.0, 2.1, 20, 90, 0.5, False, False, 0.0, True)


def test_lives_fill_the_time_and_repeat() -> None:
    found = lives(1, 600.0, 24)
    assert found == lives(1, 600.0, 24)
    assert sum(life.seconds for life in found) == pytest.approx(600.0)
    assert [life.lost is None for life in found] == [False] * 24 + [True]
    assert {life.lost for life in found[:-1]} == set(range(HOSTS))


def test_only_committed_steps_are_counted(tmp_path: Path) -> None:
    for name in ("fast/host0/run/step-0000000005/COMMIT", "fast/host0/run/step-0000000010/manifest.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    for name in ("host1/7/default", "host1/8.orbax-checkpoint-tmp/default"):
        (tmp_path / name).mkdir(parents=True)
    assert committed(tmp_path) == {"step-0000000005", "7"}


def test_page_shows_each_set_up(tmp_path: Path) -> None:
    run = {
        "goodput": dataclasses.asdict(goodput_of([FACTS], 80, 0.1)),
        "restore_s": 1.0,
        "restores": 1,
        "start_s": 1.0,
        "saves": {"fast": 3, "slow": 2},
        "passed": (0, 256 << 20),
    }
    results = {"command": "x", "seconds": 10.0, "seed": 1, "mib": 128, "kills": 1, "runs": {"orbax": run}}
    machine = dict.fromkeys(("cores", "processor", "memory_bytes", "kernel", "file_system", "device", "commit"), 1)
    versions = dict.fromkeys(("python", "jax", "numpy", "orbax-checkpoint"), "1")
    fast_tier_goodput.write(tmp_path, {**machine, **versions}, {**results, "failed": {}, "too_fast": []})
    page = (tmp_path / fast_tier_goodput.PAGE).read_text(encoding="utf-8")
    assert "| orbax | 80.0% | 80 | -10 | 1.00 s (1) | 1.00 s | 3 | 2 | 256 / 0 |" in page
