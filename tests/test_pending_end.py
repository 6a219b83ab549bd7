"""The end of a process with a save under way: interrupts meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

# Exit functions run in the reverse order; those that are registered before the import come after the wait.
INTERRUPTED = """
import atexit, ctypes, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background of a shell, it would be ignored
atexit.register(lambda: print("last", flush=True))
{after_ours}
from jaxckpt_train import pending
at_end, never = threading.Event(), threading.Event()

def send():
    at_end.wait()
    while not pending._given_up:  # again, since one may come before the wait has begun
        os.kill(os.getpid(), {signal})
        never.wait(5)
    never.wait()

{save}
"""
STUCK = "pending.start_save('x', send, movement=pending.Movement(at_end.set))"  # which is asked once it is waited for
FREEING = """
save = pending.start_save('x', lambda: None)
pending.call_after(save, send)
save.committed.result()
atexit.register(at_end.set)
"""
GIVEN_UP = "jaxckpt_train: saving x was given up at the end (KeyboardInterrupt)"


def interrupted(
    run_python: Any, save: str = STUCK, after_ours: str = "", number: str = "signal.SIGINT"
) -> tuple[int, str, str]:
    done = run_python(INTERRUPTED.format(save=save, after_ours=after_ours, signal=number), timeout_s=30)
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_of_the_wait_at_the_end_gives_up_the_save_and_says_so(run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python)
    assert (code, stdout) == (130, "last\n")
    assert stderr.count(GIVEN_UP) == 1


def test_an_interrupt_while_a_save_that_was_seen_is_still_freed_ends_the_process_too(run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python, FREEING)
    assert (code, stdout) == (130, "last\n")
    assert "given up" not in stderr


def test_an_interrupt_does_not_hide_the_failure_of_another_save(run_python: Any) -> None:
    failing = "other = pending.start_save('other', lambda: 1 / 0)\nother._thread.join()\n"
    code, _, stderr = interrupted(run_python, failing + STUCK)
    assert code == 130
    assert stderr.count("jaxckpt_train: saving other failed, and nobody asked for it:") == 1
    assert stderr.count("ZeroDivisionError: division by zero") == 1
    assert stderr.count(GIVEN_UP) == 1


AGAIN = "os.kill(os.getpid(), signal.SIGINT)"
AGAIN_LATER = f"atexit.register(lambda: ({AGAIN}, signal.pause()))"
AGAIN_MEANWHILE = f"""
class Interrupting:
    def __init__(self, stream):
        self.stream, self.flush = stream, stream.flush
    def write(self, text):
        self.stream.write(text)
        if "given up" in text:
            {AGAIN}
sys.stderr = Interrupting(sys.stderr)
"""


@pytest.mark.parametrize("after_ours", [AGAIN_LATER, AGAIN_MEANWHILE, AGAIN_LATER + AGAIN_MEANWHILE])
def test_a_second_interrupt_does_no_harm(after_ours: str, run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python, after_ours=after_ours)
    assert (code, stdout) == (130, "last\n")
    assert stderr.count(GIVEN_UP) == 1


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(143)", 143), ("sys.exit(0)", 1), ("1 / 0", 1)])
def test_what_a_handler_raises_ends_the_wait_and_is_no_success(ending: str, code: int, run_python: Any) -> None:
    handler = f"def leave(*_): {ending}\nsignal.signal(signal.SIGTERM, leave)"
    done = interrupted(run_python, after_ours=handler, number="signal.SIGTERM")
    assert done[:2] == (code, "last\n")
    assert "saving x was given up at the end (" in done[2]


def test_an_interrupt_that_c_code_holds_up_loses_no_save(run_python: Any) -> None:
    saves = "save = pending.start_save('x', lambda: (at_end.wait(), never.wait(0.3), print('saved', flush=True)))"
    from_c = "\natexit.register(getattr(ctypes.PyDLL(None), 'raise'), signal.SIGINT)\natexit.register(at_end.set)"
    code, stdout, stderr = interrupted(run_python, saves + from_c)
    assert (code, stdout) == (0, "saved\nlast\n"), stderr
