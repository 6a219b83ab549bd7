"""The manager in Orbax's form: a restore in a new process does not change later saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_fresh_restore_does_not_change_later_saves(tmp_path: Path, run_python: Any) -> None:
    program = """
import sys
from flax import nnx
import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager as ocp
tree = {"model": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))}
with ocp.CheckpointManager(sys.argv[1]) as manager:
    if len(sys.argv) > 2:
        manager.restore(1, args=ocp.args.StandardRestore(tree))
    manager.save(2 if len(sys.argv) > 2 else 1, args=ocp.args.StandardSave(tree))
for step in jct.StepManager(sys.argv[1]).steps:
    print(sorted(jct.StepManager(sys.argv[1]).metadata(step).checkpointables["default"].leaves))
"""
    run_python(program, tmp_path / "run", check=True, fresh=True)
    done = run_python(program, tmp_path / "run", "again", check=True, fresh=True)
    assert done.stdout.splitlines() == ["['model/bias', 'model/kernel']"] * 2
