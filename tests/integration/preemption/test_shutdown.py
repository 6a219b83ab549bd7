"""The last save of a preempted process, with repeated signals and forked children."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.runs import Counter, state_of, step_of, talking_to
from tests.support.signal_handlers import WATCHED, handlers_put_back

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
MANY_SIGNALS = """
import sys, threading
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.runs import Counter, state_of

backend = HoldingBackend("rename", "step-0000000003")
ckpt = callback_on(backend, sys.argv[1])

def talk():
    print("ready", flush=True)
    backend.reached.wait()
    print("saving", flush=True)
    sys.stdin.readline()
    backend.go.set()

with ckpt:
    state, data = ckpt.resume(state_of(0), Counter())
    for step in ckpt.steps(10**9):
        next(data)
        state = state_of(step + 1)
        if step == 2:
            threading.Thread(target=talk, daemon=True).start()
            while ckpt._shutdown._signals.received is None:
                pass
        ckpt(state)
"""


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def check_saved(directory: Path, step: int) -> None:
    """Check that the run has exactly this step, with its position in the data."""
    manager = jct.StepManager(directory)
    assert manager.steps == [step]
    restored = manager.restore({"state": state_of(0), "data": Counter()})
    assert (step_of(restored), restored["data"].position) == (step, step)


def test_many_signals_while_saving_do_not_kill_save(tmp_path: Path) -> None:
    with talking_to(MANY_SIGNALS, tmp_path) as job:
        assert job.read() == "ready"
        job.process.send_signal(signal.SIGTERM)
        assert job.read() == "saving"
        for number in range(60):
            job.process.send_signal(getattr(signal, SIGNALS[number % 3]))
        job.tell("go on")
        code, _ = job.finish()
    assert code == 75
    check_saved(tmp_path, 3)


AGAIN = """
import atexit, os, signal, sys
import numpy as np, jaxckpt_train as jct
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))  # as launchers do
with jct.CheckpointCallback(sys.argv[1] + "/a") as outer:
    state = outer.resume({"w": np.zeros(4)})
"""
NESTED = """
    with jct.CheckpointCallback(sys.argv[1] + "/b") as inner:
        other = inner.resume({"w": np.ones(4)})
        for step in outer.steps(10):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            outer(state)
            inner(other, step=step + 1)
"""
OWN = """
    for step in outer.steps(10):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        outer(state)
    if outer.preempted:
        sys.exit(75)
"""


@pytest.mark.parametrize("loop", [NESTED, OWN])
def test_signal_at_exit_keeps_the_exit_code(tmp_path: Path, loop: str, run_python: Any) -> None:
    assert run_python(AGAIN + loop, tmp_path).returncode == 75
    assert jct.StepManager(tmp_path / "a").steps == [3]


FORKS = """
import os, sys
from tests.support.fake_backends import HoldingBackend, callback_on
from tests.support.runs import state_of
backend = HoldingBackend("rename", "step-0000000001")
child = None
with callback_on(backend, sys.argv[1], save_interval_steps=1) as ckpt:
    ckpt.resume(state_of(0))
    ckpt(state_of(1))
    child = os.fork()
    if child == 0:
        {ending}
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    backend.go.set()
if child == 0:
    print("of the child", flush=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("1 / 0", 1)])
def test_forked_child_leaves_save_to_its_parent(tmp_path: Path, ending: str, code: int, run_python: Any) -> None:
    done = run_python(FORKS.format(ending=ending), tmp_path, check=True)
    assert done.stdout == f"child {code}\n"
    assert "CheckpointTimeoutError" not in done.stderr
    assert ("Traceback" in done.stderr) == (ending == "1 / 0")
    assert jct.StepManager(tmp_path).steps == [1]
