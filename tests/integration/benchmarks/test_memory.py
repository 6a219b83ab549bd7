"""Tests of benchmarks.memory: that memory which is taken, kept or leaked is seen, and where the limits are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cost_process import run_fresh
from benchmarks.memory_verdict import MIB, Series
from tests.conftest import RunPython


def test_a_library_that_keeps_something_of_every_save_is_seen_to_leak(tmp_path: Path, run_python: RunPython) -> None:
    """In a process of its own: this one may have freed memory that would be used first."""
    script = """
import json, sys
from pathlib import Path
from benchmarks.memory_child import run_series
from tests.unit.benchmarks.test_memory import MIB, Greedy
print(json.dumps(run_series(Greedy(MIB), 20, MIB, Path(sys.argv[1]))["rss_bytes"]))
"""
    leaky = Series.of(json.loads(run_python(script, tmp_path, check=True, fresh=True).stdout))
    assert leaky.leaks
    assert leaky.line.slope == pytest.approx(MIB, rel=0.25)


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no subject 'theirs'"):
        run_fresh("benchmarks.step_time_subjects:make_subject", {"name": "theirs"})
