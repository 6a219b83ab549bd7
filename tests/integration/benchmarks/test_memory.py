"""benchmarks.memory in new processes: a leak is detected, and errors are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cost_process import run_fresh
from benchmarks.memory_verdict import MIB, Series
from tests.conftest import RunPython


@pytest.mark.nightly
def test_leak_in_every_save_is_detected(tmp_path: Path, run_python: RunPython) -> None:
    """In a new process: this one may have freed memory that would be reused first."""
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


def test_failed_measurement_has_its_error() -> None:
    with pytest.raises(RuntimeError, match="no subject 'theirs'"):
        run_fresh("benchmarks.step_time_subjects:make_subject", {"name": "theirs"})
