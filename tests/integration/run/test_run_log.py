"""The events of a process: a forked child adds none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct

pytestmark = pytest.mark.timeout(120)


FORKS = """
import os, sys
import jaxckpt_train as jct
from tests.support.runs import state_of

with jct.CheckpointCallback(sys.argv[1], save_interval_steps=2) as ckpt:
    ckpt.resume(state_of(0))
    for step in ckpt.steps(4):
        ckpt(state_of(step + 1))
        if step == 2:
            child = os.fork()
            if child == 0:
                ckpt.summary()
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
if os.getpid() == ckpt.manager._run._lock._record.process.pid:
    print(os.getpid())
"""


def test_forked_child_records_no_end(tmp_path: Path, run_python: Any) -> None:
    done = run_python(FORKS, tmp_path, check=True)
    events = jct.StepManager(tmp_path).history.events()
    assert [event["event"] for event in events] == ["start", "resumed", "save", "save", "end"]
    assert done.stdout.splitlines()[-1] == str(events[0]["pid"])
    assert (events[-1]["how"], events[-1]["step"]) == ("finished", 4)
    assert events[0]["pid"] != os.getpid()
