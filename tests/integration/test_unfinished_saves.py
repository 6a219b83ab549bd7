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

def late():
    from jaxckpt_train.pending import start_save
    from tests.support.interrupts import once_waiting
    once_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        start_save("x", go.wait)
    finally:
        print("not reached", flush=True)

atexit.register(late)
import jaxckpt_train.pending  # its exit function comes before that
"""


@pytest.mark.parametrize(
    ("raises", "code"), [("raise KeyboardInterrupt", 130), ("sys.exit(3)", 3), ("sys.exit(0)", 1), ("1 / 0", 1)]
)
def test_interrupted_wait_of_exit_function_abandons_save(raises: str, code: int, run_python: Any) -> None:
    done = run_python(LEFT_LATE.format(raises=raises), timeout_s=60, fresh=True)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("saving x was abandoned") == 1


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

from jaxckpt_train.pending import start_save
atexit.register(late)
start_save("x", lambda: 1 / 0)
"""


@pytest.mark.parametrize("by", ["os", "multiprocessing"])
def test_child_forked_after_failure_keeps_exit_code(by: str, run_python: Any) -> None:
    done = run_python(FORKS_LATE, by, timeout_s=60, fresh=True)
    assert (done.returncode, done.stdout) == (1, "exit code 0\n"), done.stderr
