"""Unreadable files are not reported as damaged, and the rest of a run is still reported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.commands import ended
from tests.support.runs import flip_a_payload_byte, made_run, segment_of, step_path
from tests.support.tiers import nightly_after

LOST = "-dac_override,-dac_read_search"
AS_ANYBODY = ["setpriv", f"--bounding-set={LOST}", f"--inh-caps={LOST}"] if os.getuid() == 0 else []
needs_setpriv = pytest.mark.skipif(
    bool(AS_ANYBODY) and shutil.which("setpriv") is None, reason="needs setpriv, to be held back by permissions as root"
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A run, whose permissions are restored afterwards."""
    made = made_run(tmp_path / "run", 1, 2, 3)
    yield made
    for path in (step_path(made, 3), step_path(made, 2)):
        path.chmod(0o755)


def called(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command that permissions apply to, even for root, and return its exit code and outputs."""
    return ended([*AS_ANYBODY, sys.executable, "-m", "jaxckpt_train.cli", *map(str, arguments)])


@needs_setpriv
@pytest.mark.parametrize("what", nightly_after(1, ["manifest", "step"]))
def test_unreadable_newer_step_is_not_skipped(directory: Path, tmp_path: Path, what: str) -> None:
    (step_path(directory, 3) if what == "step" else step_path(directory, 3) / "manifest.json").chmod(0)
    for command in (["verify", directory], ["show", directory], ["cp", directory, tmp_path / "copy"]):
        code, printed, error = called(*command)
        assert (code, printed) == (4, "")
        assert error.count("\n") == 1
        assert str(step_path(directory, 3)) in error
        assert "--step 2" in error
    assert not (tmp_path / "copy").exists()
    assert called("verify", directory, "--step", "2")[0] == 0


@needs_setpriv
@pytest.mark.parametrize("what", nightly_after(2, ["step", "data", "manifest"]))
def test_doctor_and_prune_report_readable_steps(directory: Path, what: str) -> None:
    step = step_path(directory, 3)
    {"step": step, "manifest": step / "manifest.json", "data": segment_of(step)}[what].chmod(0)
    code, printed, _ = called("doctor", directory, "--size-mib", "0", "--json")
    found = json.loads(printed)
    assert code == 1
    assert list(found["run"]["unreadable"]) == [step.name]
    assert (found["run"]["damaged"], found["run"]["uncommitted"], found["run"]["newest_step"]) == ({}, {}, 2)
    (warning,) = found["warnings"]
    assert warning.startswith(f"{step.name}: ")
    assert "Permission denied" in warning
    for yes in ([], ["--yes"]):
        code, printed, _ = called("prune", directory, "--keep-latest", "1", "--json", *yes)
        is_refused = what == "data" and bool(yes)  # a kept step cannot be synced, so nothing is deleted
        assert code == (4 if is_refused else 1)
        goes = {each["step"]: each["goes"] for each in json.loads(printed)["steps"]}
        assert goes == {1: True, 2: False, 3: False}
    there = (1, 2, 3) if what == "data" else (2, 3)
    assert sorted(path.name for path in directory.glob("step-*")) == [step_path(directory, n).name for n in there]


@needs_setpriv
def test_verify_and_scrub_report_unreadable_data(directory: Path) -> None:
    segment_of(step_path(directory, 3)).chmod(0)
    step_path(directory, 2).chmod(0)
    code, printed, _ = called("verify", directory, "--step", "3")
    assert code == 4
    assert "DAMAGED" not in printed
    assert "CANNOT BE READ, 0 B of " in printed
    code, printed, _ = called("verify", directory, "--step", "3", "--json")
    found = json.loads(printed)
    assert (code, found["ok"], found["damaged"], found["bytes"]) == (4, False, False, 0)
    code, printed, _ = called("scrub", directory)
    assert code == 4
    assert "3 steps, 0 damaged, 2 cannot be read" in printed
    flip_a_payload_byte(step_path(directory, 1))
    code, printed, _ = called("scrub", directory, "--json")
    assert code == 1
    assert [each["damaged"] for each in json.loads(printed)["steps"]] == [False, False, True]


@needs_setpriv
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("name", nightly_after(1, ["w/0", "w/.zarray", "n/0"]))
def test_unreadable_orbax_array_is_not_damage(tmp_path: Path, name: str) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "a", {"w": np.arange(5.0), "n": 3})
    (tmp_path / "a" / name).chmod(0)
    for command in (["import", tmp_path / "a", tmp_path / "b"], ["stats", tmp_path / "a"]):
        code, printed, error = called(*command)
        assert (code, printed) == (4, "")
        assert "Permission denied" in error
    assert not (tmp_path / "b").exists()
