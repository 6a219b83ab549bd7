"""The end of a process: unfinished saves, saves that start meanwhile, and what a fork inherits."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

LEFT_LATE = """
import atexit, os, signal, sys, threading
def leave(*_):
    {raises}
signal.signal(signal.SIGINT, leave)
go = threading.Event()
atexit.register(lambda: print("last", flush=True))

def late():
    from jaxckpt_train.pending import start_save
    from tests.support.interrupts import once_waiting
    once_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        start_save("x", lambda: (go.wait(), {work}))
    finally:
        {then}

atexit.register(late)
import jaxckpt_train.pending  # its exit function comes before that
"""
ENDS = "go.set(); [each.join() for each in threading.enumerate() if each.name == 'jaxckpt-save']"


@pytest.mark.parametrize(
    ("raises", "code"), [("raise KeyboardInterrupt", 130), ("sys.exit(3)", 3), ("sys.exit(0)", 1), ("1 / 0", 1)]
)
def test_interrupted_wait_of_exit_function_abandons_save(raises: str, code: int, run_python: Any) -> None:
    done = run_python(LEFT_LATE.format(raises=raises, work="None", then="pass"), timeout_s=60, fresh=True)
    assert (done.returncode, done.stdout) == (code, "last\n"), done.stderr
    assert done.stderr.count("saving x was abandoned") == 1


@pytest.mark.parametrize(("work", "code"), [("None", 0), ("1 / 0", 130)])
def test_abandoned_save_that_commits_is_no_failure(work: str, code: int, run_python: Any) -> None:
    done = run_python(
        LEFT_LATE.format(raises="raise KeyboardInterrupt", work=work, then=ENDS), timeout_s=60, fresh=True
    )
    assert (done.returncode, done.stdout) == (code, "last\n"), done.stderr


# While Python code of the exit looks at the threads, another thread may run and start a save.
BEGUN_MEANWHILE = """
import sys
from jaxckpt_train import pending
from jaxckpt_train.pending import start_save
threads = []

def begin():
    save = start_save("y", int)
    threads.append(save._thread)

def trace(frame, event, _):
    if event == "return" and frame.f_code.co_filename.endswith("_weakrefset.py") and len(threads) < 20:
        begin()
    return trace

begin()
sys.settrace(trace)
"""


def test_saves_may_start_while_exit_checks_threads(run_python: Any) -> None:
    done = run_python(BEGUN_MEANWHILE, timeout_s=60, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")


FORKS_LATE = """
import atexit, multiprocessing, os, sys, warnings
warnings.simplefilter("ignore")

def late():
    if sys.argv[1] == "os":
        child = os.fork()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None
    else:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        code = process.exitcode
    if code is not None:
        print("exit code", code, flush=True)

atexit.register(late)
from jaxckpt_train.pending import start_save
start_save("x", lambda: 1 / 0)
"""


@pytest.mark.parametrize("by", ["os", "multiprocessing"])
def test_child_forked_after_failure_keeps_exit_code(by: str, run_python: Any) -> None:
    done = run_python(FORKS_LATE, by, timeout_s=60, fresh=True)
    assert (done.returncode, done.stdout) == (1, "exit code 0\n"), done.stderr
