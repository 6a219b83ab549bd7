"""save_and_load.py runs, and what it shows is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jaxckpt_train as jct


def test_everything_that_is_loaded_is_what_was_saved(run_example: Any, tmp_path: Path) -> None:
    output = run_example("save_and_load.py", str(tmp_path), cwd=tmp_path)
    assert output.count("same bytes: True") == 9
    assert "False" not in output
    assert "shards of [32, 8] on 8 devices" in output
    assert jct.verify(tmp_path / "checkpoint").ok
