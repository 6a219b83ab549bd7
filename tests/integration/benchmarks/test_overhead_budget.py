"""benchmarks.overhead_budget: the kernel limits the writes of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import write_limit
from benchmarks.cost_process import run_fresh
from benchmarks.write_limit import CannotLimitError

MIB = 1 << 20


def test_write_limit_slows_its_processes(tmp_path: Path) -> None:
    try:
        with write_limit.write_limit(tmp_path) as limit:
            limit.set(16 * MIB)
            probe = {"directory": str(tmp_path), "nbytes": 8 * MIB}
            found = run_fresh("benchmarks.write_limit:measured_bytes_per_s", probe, under=limit.command())
    except CannotLimitError as error:
        pytest.skip(str(error))
    assert found < 1.5 * 16 * MIB
    assert not Path(limit.group).exists()
