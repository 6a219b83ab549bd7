"""The metadata of PyTorch's distributed checkpoints: real pickles that would run code are refused, and none is run."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from tests.support import paths

GOLDEN = paths.GOLDEN / "torch"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the committed checkpoint."""
    shutil.copytree(GOLDEN, tmp_path / "dcp")
    return tmp_path / "dcp"


class Malicious:
    """An object whose pickle makes the given call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        lambda marker: (os.system, f"touch {marker}"),
        lambda marker: (os.mkdir, str(marker)),
        lambda marker: (eval, f"__import__('os').mkdir({str(marker)!r})"),
        lambda marker: (exec, f"import os; os.mkdir({str(marker)!r})"),
        lambda marker: (subprocess.run, ["touch", str(marker)]),
        lambda marker: (shutil.copytree, str(GOLDEN), str(marker)),
    ],
)
def test_pickle_that_would_run_code_is_refused(call: Any, protocol: int, golden: Path) -> None:
    marker = golden.parent / "was_run"
    data = pickle.dumps({"state_dict_metadata": Malicious(*call(marker))}, protocol=protocol)
    (golden / ".metadata").write_bytes(data)
    with pytest.raises(jct.CorruptCheckpointError):
        jct.load(golden)
    assert CliRunner().invoke(app, ["show", str(golden)]).exit_code != 0
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "this pickle runs no code, so the test shows nothing"


def test_pytorch_is_imported_only_if_needed(tmp_path: Path, run_python: Any) -> None:
    program = f"""
import sys
import jaxckpt_train as jct
from jaxckpt_train.formats.detect import find_in_directory
jct.save({str(tmp_path / "a")!r}, {{"w": 1}})
jct.load({str(tmp_path / "a")!r})
print("torch" in sys.modules)
"""
    assert run_python(program, check=True, fresh=True).stdout.split() == ["False"]
