"""`jaxckpt doctor`: it reports the owner of a run, unsaved updates and stale files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from tests.support.commands import json_of, printed
from tests.support.runs import (
    save_steps,
    talking_to,
)

SMALL = ("--size-mib", 1)
TRAINING = """
import sys, datetime
import jax.numpy as jnp
import jaxckpt_train as jct
manager = jct.StepManager(sys.argv[1])
for step in (1, 2):
    manager.save(step, {"state": {"n": jnp.int32(step)}})
    manager.wait()
manager.history.add("progress", datetime.datetime.now(datetime.UTC), step=7)
print("at 7")
sys.stdin.readline()
"""


def test_live_owner_and_unsaved_updates_are_shown(tmp_path: Path) -> None:
    with talking_to(TRAINING, tmp_path / "run") as training:
        assert training.read() == "at 7"
        found = json_of("doctor", tmp_path / "run", *SMALL)
        assert set(found["owner"]) == {"name", "is_alive", "silent_s"}
        assert found["owner"]["name"].startswith(f"process {training.process.pid} on ")
        assert found["owner"]["is_alive"] is True
        assert -1 < found["owner"]["silent_s"] < 60
        risk = found["at_risk"]
        assert set(risk) == {"is_live", "how", "completed", "since", "updates", "heard_s"}
        assert (risk["is_live"], risk["completed"], risk["since"], risk["updates"]) == (True, 7, 2, 5)
        assert found["warnings"] == []
        assert "5 updates since step 2 would be lost" in printed("doctor", tmp_path / "run", *SMALL)
    found = json_of("doctor", tmp_path / "run", *SMALL)
    assert found["owner"]["is_alive"] is False
    assert (found["at_risk"]["is_live"], found["at_risk"]["how"], found["at_risk"]["updates"]) == (False, "killed", 5)
    text = printed("doctor", tmp_path / "run", *SMALL)
    assert ", dead, last heard of" in text
    assert "lost: 5 updates since step 2" in text


KILLED_IN_A_SAVE = """
import os, sys
import jax.numpy as jnp
import jaxckpt_train as jct
from jaxckpt_train.store import transaction
manager = jct.StepManager(sys.argv[1])
manager.save(1, {"state": {"n": jnp.int32(1)}})
manager.wait()
transaction.Transaction.commit = lambda *_, **__: os._exit(1)
manager.save(2, {"state": {"n": jnp.int32(2)}})
manager.wait()
"""


def test_stale_files_are_reported_and_kept(tmp_path: Path, run_python: Any) -> None:
    directory = tmp_path / "run"
    assert run_python(KILLED_IN_A_SAVE, directory).returncode == 1
    (directory / ".step-0000000007.tmp-00000000-00000000-1-1-0").mkdir()
    left = sorted(path.name for path in directory.iterdir() if path.name.startswith(".step"))
    assert len(left) == 2
    found = json_of("doctor", directory, *SMALL, code=1)
    assert sorted(found["run"]["stale_files"]) == left
    (warning,) = found["warnings"]
    assert all(name in warning for name in left)
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith(".step")) == left
    with jct.StepManager(directory) as manager:
        save_steps(manager, 3)
    assert json_of("doctor", directory, *SMALL)["run"]["stale_files"] == []
