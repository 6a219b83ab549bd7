"""`ckpt.summary()`: how a run that was killed spent its time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.runs import talking_to
from tests.support.signal_handlers import WATCHED, handlers_put_back
from tests.support.summary_runs import callback, rows, train


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


OWNER = """
import os, signal, sys
import jaxckpt_train as jct
from jaxckpt_train.run import history, lock
from tests.support.runs import Counter, state_of

lock.HEARTBEAT_S, history.LEAST_S, history.MOST_S = 0.02, 0.0, 0.0
with jct.CheckpointCallback(sys.argv[1], save_interval_steps=10) as ckpt:
    ckpt.resume(state_of(0), Counter())
    for step in ckpt.steps(100):
        ckpt(state_of(step + 1))
        if step == 16:
            ckpt.wait_until_finished()
            while not any(each["event"] == "progress" and each["step"] == 17 for each in ckpt.manager.history.events()):
                pass
            print("ready", flush=True)
            sys.stdin.readline()
"""


def test_killed_process_and_lost_work_are_counted(tmp_path: Path) -> None:
    with talking_to(OWNER, tmp_path) as owner:
        assert owner.read() == "ready"
        assert rows(jct.StepManager(tmp_path).goodput()) == [("running", 0, 17, 17, 0, 1)]
        owner.kill()
    reader = jct.StepManager(tmp_path)
    assert rows(reader.goodput()) == [("killed", 0, 17, 17, 0, 1)]  # no process has continued yet
    train(callback(tmp_path), 30)
    found = reader.goodput()
    assert rows(found) == [("killed", 0, 17, 10, 7, 1), ("finished", 10, 30, 20, 0, 2)]
    assert (found.useful_steps, found.redone_steps) == (30, 7)
