"""Handlers of callbacks in real processes, removed in any order or never: no signal is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO_ROOT
from tests.support.signal_handlers import handlers_put_back
from tests.support.tiers import nightly_after

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(signal.SIGTERM, signal.SIGUSR1, signal.SIGABRT):
        yield


HEAD = """
import gc, os, signal, sys
import numpy as np
import jaxckpt_train as jct

def started(name):
    ckpt = jct.CheckpointCallback(f"{sys.argv[1]}/{name}", save_interval_steps=10)
    ckpt.resume({"w": np.ones(3)})
    return ckpt

def send():
    os.kill(os.getpid(), signal.SIGTERM)
    print("lives on", flush=True)
"""
IN_ORDER = "a, b = started('a'), started('b'); a.close(); b.close(); send()"
DROPPED = "a = started('a'); del a; gc.collect(); send()"
PUT_BACK = "a = started('a'); of_a = signal.signal(signal.SIGTERM, print); a.close(); signal.signal(15, of_a); send()"
FORKED = """
a, b, c = started('a'), started('b'), started('c')
b.close(); del c; gc.collect()
child = os.fork()
if child == 0:
    send()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -15, status
a.close()
send()
"""


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "script", [IN_ORDER, DROPPED, PUT_BACK, FORKED], ids=["in order", "dropped", "put back", "fork"]
)
def test_closed_callbacks_let_sigterm_end_the_process(tmp_path: Path, run_python: Any, script: str) -> None:
    done = run_python(HEAD + script, tmp_path, timeout_s=60)
    assert (done.returncode, done.stdout) == (-TERM, ""), done.stderr


STILL_ONE = "a, b = started('a'), started('b'); a.close(); send(); assert b.poll(); b.close(); send()"


def test_open_callback_still_gets_signals(tmp_path: Path, run_python: Any) -> None:
    done = run_python(HEAD + STILL_ONE, tmp_path, timeout_s=60)
    assert (done.returncode, done.stdout) == (-TERM, "lives on\n"), done.stderr


LEAVES = """
with jct.CheckpointCallback(f"{sys.argv[1]}/run", save_interval_steps=10) as ckpt:
    state = ckpt.resume({"w": np.ones(3)})
    for step in ckpt.steps(10**9):
        state = {"w": state["w"] + 1}
        ckpt(state)
        print(step, flush=True)
"""


@pytest.mark.parametrize("times", nightly_after(1, [5, 1, 20]))
def test_repeated_signal_keeps_the_exit_code(tmp_path: Path, times: int) -> None:
    variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", HEAD + LEAVES, str(tmp_path)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        for _ in range(times):
            process.send_signal(TERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        process.stdout.read()
        errors = process.stderr.read()
    assert process.returncode == 75, errors


LEAVES_SLOWLY = """
import atexit
import numpy as np
import jaxckpt_train as jct

def last():
    print("ending", flush=True)
    sys.stdin.readline()

atexit.register(last)
notice = {"notice_file": sys.argv[2]} if "file" in sys.argv else {"max_run_time_s": 20.3} if "time" in sys.argv else {}
with jct.CheckpointCallback(sys.argv[1], **notice, grace_period_s=20) as ckpt:
    state = ckpt.resume({"w": np.zeros(2)})
    print("begins", flush=True)
    for step in ckpt.steps(10**9):
        ckpt(state)
"""


@pytest.mark.parametrize(
    ("first", "second"),
    nightly_after(
        3,
        [
            ("SIGUSR2", "SIGUSR1 SIGTERM SIGTERM"),
            ("file", "SIGTERM"),
            ("time", "SIGUSR1 SIGTERM"),
            ("SIGUSR1", "SIGTERM"),
            ("SIGTERM", "SIGUSR1"),
        ],
    ),
)
def test_second_kind_of_signal_keeps_exit_code(tmp_path: Path, first: str, second: str) -> None:
    command = [sys.executable, "-c", HEAD + LEAVES_SLOWLY, str(tmp_path / "run"), str(tmp_path / "notice"), first]
    variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_PLATFORMS": "cpu"}
    pipe: Any = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        if first == "file":
            (tmp_path / "notice").touch()
        elif first != "time":
            process.send_signal(signal.Signals[first])
        assert process.stdout.readline() == "ending\n"
        for name in second.split():
            process.send_signal(signal.Signals[name])
        _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 75, errors


LIVES_ON = """
from jaxckpt_train.preemption.sources import SignalNotice

notice = SignalNotice(["SIGTERM"])
notice.install()
(handler,) = notice._handlers.values()
send()
notice.restore(leaving=True)
send()
handler._ignores_until = 0.0  # half a minute later
send()
"""


def test_surviving_process_gets_signals_after_a_while(tmp_path: Path, run_python: Any) -> None:
    done = run_python(HEAD + LIVES_ON, tmp_path, timeout_s=60)
    assert (done.returncode, done.stdout) == (-TERM, "lives on\nlives on\n"), done.stderr
