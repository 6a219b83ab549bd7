"""What fails when a `with` closes a run: who says that all is well does not hide it, and an interrupt comes through."""

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
def test_a_process_whose_last_save_failed_does_not_end_with_0(
    tmp_path: Path, given: str, code: int, run_python: Any
) -> None:
    done = run_python(EXITS, tmp_path, given)
    assert done.returncode == code
    assert "NonFiniteError" in done.stderr
