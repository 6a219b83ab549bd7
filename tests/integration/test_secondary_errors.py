"""The exit code of a process whose last save fails while a `with` statement closes the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXITS = """
import sys
import numpy as np
import jaxckpt_train as jct
with jct.StepManager(sys.argv[1], settings=jct.StoreSettings(nonfinite="reject")) as manager:
    manager.save(1, {"state": np.full(4, np.nan)})
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("given", "code"), [("0", 1), ("7", 7)])
def test_failed_last_save_changes_exit_code_0(tmp_path: Path, given: str, code: int, run_python: Any) -> None:
    done = run_python(EXITS, tmp_path, given)
    assert done.returncode == code
    assert "NonFiniteError" in done.stderr
