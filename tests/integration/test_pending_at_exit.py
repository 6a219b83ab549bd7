"""The end of a process while a save is running: interrupts, and children of `multiprocessing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.saving import CALL_S
from tests.support.tiers import nightly_after

pytestmark = pytest.mark.timeout(180)

INTERRUPTED = """
import atexit, ctypes, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background of a shell, it would be ignored
atexit.register(lambda: print("last", flush=True))  # only if the process ends as usual
{after_ours}
from jaxckpt_train import pending
at_end, never = threading.Event(), threading.Event()

def send():
    at_end.wait()
    while True:  # repeat it, since a signal may arrive before the wait
        os.kill(os.getpid(), {signal})
        never.wait(5)

{save}
"""
STUCK = "pending.start_save('x', send, tracker=pending.ProgressTracker(at_end.set))"
FREEING = """
save = pending.start_save('x', lambda: None)
save.committed.add_done_callback(lambda _: send())
save.committed.result()
atexit.register(at_end.set)
"""
ABANDONED = "saving x was abandoned"


def interrupted(
    run_python: Any, save: str = STUCK, after_ours: str = "", number: str = "signal.SIGINT"
) -> tuple[int, str, str]:
    done = run_python(INTERRUPTED.format(save=save, after_ours=after_ours, signal=number), timeout_s=30, fresh=True)
    return done.returncode, done.stdout, done.stderr


def test_interrupted_wait_at_exit_abandons_save(run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python)
    assert (code, stdout) == (130, "")
    assert stderr.count(ABANDONED) == 1
    assert "(KeyboardInterrupt)" in stderr


def test_interrupt_during_cleanup_ends_process(run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python, FREEING)
    assert (code, stdout) == (130, "")
    assert "abandoned" not in stderr


def test_interrupt_does_not_hide_failure_of_another_save(run_python: Any) -> None:
    failing = "other = pending.start_save('other', lambda: 1 / 0)\nother._thread.join()\n"
    code, _, stderr = interrupted(run_python, failing + STUCK)
    assert code == 130
    assert stderr.count("saving other failed") == 1
    assert stderr.count("ZeroDivisionError: ") == 1
    assert stderr.count(ABANDONED) == 1


AGAIN = "os.kill(os.getpid(), signal.SIGINT)"
AGAIN_MEANWHILE = f"""
class Interrupting:
    def __init__(self, stream):
        self.stream, self.flush = stream, stream.flush
    def write(self, text):
        self.stream.write(text)
        if "abandoned" in text:
            {AGAIN}
sys.stderr = Interrupting(sys.stderr)
"""


def test_second_interrupt_at_exit_changes_nothing(run_python: Any) -> None:
    code, stdout, stderr = interrupted(run_python, after_ours=AGAIN_MEANWHILE)
    assert (code, stdout) == (130, "")
    assert stderr.count(ABANDONED) == 1


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(143)", 143), ("sys.exit(0)", 1), ("1 / 0", 1)])
def test_error_of_signal_handler_ends_the_wait(ending: str, code: int, run_python: Any) -> None:
    handler = f"def leave(*_): {ending}\nsignal.signal(signal.SIGTERM, leave)"
    done = interrupted(run_python, after_ours=handler, number="signal.SIGTERM")
    assert done[:2] == (code, "")
    assert ABANDONED in done[2]


def test_interrupt_delayed_by_c_code_loses_no_save(run_python: Any) -> None:
    saves = "save = pending.start_save('x', lambda: (at_end.wait(), never.wait(0.3), print('saved', flush=True)))"
    from_c = "\natexit.register(getattr(ctypes.PyDLL(None), 'raise'), signal.SIGINT)\natexit.register(at_end.set)"
    code, stdout, stderr = interrupted(run_python, saves + from_c)
    assert (code, stdout) == (0, "saved\nlast\n"), stderr


CHILD = """
import atexit, multiprocessing, sys, threading
from multiprocessing import util
from pathlib import Path

def child(path, queue):
    from jaxckpt_train.pending import start_save
    at_end = threading.Event()
    def work():
        at_end.wait()
        threading.Event().wait(0.3)  # as a disk would take
        {work}
        Path(path).touch()
    start_save("x", work)
    util.Finalize(None, print, ("finalizer",), exitpriority=-100)
    atexit.register(at_end.set)
    util.Finalize(None, at_end.set, exitpriority=0)
    queue.put("all of it")
    {ending}

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(sys.argv[2], queue))
    process.start()
    assert queue.get(timeout=60) == "all of it"
    process.join(60)
    print("exit code", process.exitcode)
"""


def in_child(run_python: Any, tmp_path: Path, how: str, ending: str = "pass", work: str = "pass") -> tuple[str, str]:
    script = tmp_path / "script.py"
    script.write_text(CHILD.format(work=work, ending=ending))
    done = run_python(script, how, tmp_path / "saved", check=True)
    return done.stdout, done.stderr


METHODS = pytest.mark.parametrize("how", nightly_after(2, ["fork", "spawn", "forkserver"]))


@METHODS
@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("sys.exit(7)", 7), ("raise ValueError('of the child')", 1)])
def test_a_child_of_multiprocessing_ends_after_its_saves(
    how: str, ending: str, code: int, tmp_path: Path, run_python: Any
) -> None:
    stdout, stderr = in_child(run_python, tmp_path, how, ending)
    assert stdout == f"finalizer\nexit code {code}\n"
    assert (tmp_path / "saved").exists()
    assert ("ValueError: of the child" in stderr) == (code == 1)
    assert "jaxckpt_train" not in stderr


@METHODS
@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise ValueError('of the child')"])
def test_child_with_failed_save_exits_with_1(how: str, ending: str, tmp_path: Path, run_python: Any) -> None:
    stdout, stderr = in_child(run_python, tmp_path, how, ending, work="raise OSError('a disk')")
    assert stdout == "finalizer\nexit code 1\n"
    assert stderr.count("saving x failed") == 1
    assert stderr.count("OSError: a disk") == 1
    assert stderr.count("ValueError: of the child") == ending.startswith("raise")


SAVES_IN_CHILD = """
import multiprocessing, sys
def child(path):
    import numpy as np
    import jaxckpt_train as jct
    jct.save_async(path, {"w": np.arange(1 << 20)})
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join(60)
    sys.exit(process.exitcode)
"""


@METHODS
def test_last_save_of_a_child_is_committed(how: str, tmp_path: Path, run_python: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVES_IN_CHILD)
    run_python(script, how, tmp_path / "c", check=True)
    assert jct.verify(tmp_path / "c").ok


def test_save_does_not_import_multiprocessing(run_python: Any) -> None:
    script = """
        import sys
        from jaxckpt_train.pending import start_save
        start_save("x", int).wait()
        print([name for name in sys.modules if name.startswith("multiprocessing")])
    """
    assert run_python("if True:" + script, check=True, fresh=True).stdout == "[]\n"


IN_A_THREAD = """
import multiprocessing, sys, threading
from pathlib import Path

def train(path):
    threading.Event().wait(0.5)  # the function of the child returns, and its end begins
    from jaxckpt_train.pending import start_save
    def work():
        threading.Event().wait(0.3)
        {work}
        Path(path).touch()
    start_save("x", work)

def child(path):
    threading.Thread(target=train, args=(path,)).start()

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join(60)
    print("exit code", process.exitcode)
"""


@METHODS
@pytest.mark.parametrize(("work", "code"), [("pass", 0), ("raise OSError('a disk')", 1)])
def test_child_waits_for_saves_of_its_threads(how: str, work: str, code: int, tmp_path: Path, run_python: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_A_THREAD.format(work=work))
    done = run_python(script, how, tmp_path / "saved", check=True)
    assert done.stdout == f"exit code {code}\n"
    assert (tmp_path / "saved").exists() == (code == 0)
    assert done.stderr.count("OSError: a disk") == code


AFTER_THE_WAIT = """
import atexit, sys, threading
import jaxckpt_train as jct

def last():
    import numpy as np
    from jaxckpt_train.pending import start_save
    {last}

atexit.register(last)
{first}
"""
SLOW = "start_save('x', lambda: (threading.Event().wait(0.3), print('saved', flush=True)))"
FIRST = pytest.mark.parametrize("first", nightly_after(1, ["", "jct.save(sys.argv[1] + '/first', {'w': 1})"]))


@FIRST
def test_save_of_an_exit_function_is_awaited(first: str, tmp_path: Path, run_python: Any) -> None:
    done = run_python(AFTER_THE_WAIT.format(last=SLOW, first=first), tmp_path, check=True, fresh=True)
    assert (done.stdout, done.stderr) == ("saved\n", "")


@FIRST
def test_failed_save_of_exit_function_exits_with_1(first: str, tmp_path: Path, run_python: Any) -> None:
    done = run_python(AFTER_THE_WAIT.format(last="start_save('x', lambda: 1 / 0)", first=first), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: ") == 1


@FIRST
def test_run_may_be_saved_in_exit_function(first: str, tmp_path: Path, run_python: Any) -> None:
    saves = "manager = jct.StepManager(sys.argv[1] + '/run'); manager.save(1, {'state': np.ones(3)})"
    timed = f"import time; begun = time.monotonic(); {saves}; print(time.monotonic() - begun)"
    done = run_python(AFTER_THE_WAIT.format(last=timed, first=first), tmp_path, check=True, fresh=True)
    assert float(done.stdout) < CALL_S
    assert jct.StepManager(tmp_path / "run").steps == [1]


# Python 3.12 starts no threads in exit functions, nor for threads that outlive the main one. Other versions do.
NO_THREADS = """
import threading
def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
threading._shutdown, _end = lambda: (setattr(threading, "_start_new_thread", refuse), _end()), threading._shutdown
"""
RUN = "jct.StepManager(sys.argv[1] + '/run')"
SAVES_LATE = {
    "exit function": f"""
manager = {RUN}
def last():
    manager.save(2, {{"state": np.arange(2)}})
    manager.close()
atexit.register(last)
""",
    "first save": f"""
def last():
    with {RUN} as manager:
        manager.save(2, {{"state": np.arange(2)}})
atexit.register(last)
""",
    "thread": f"""
def train():
    threading.main_thread().join()
    with {RUN} as manager:
        for step in (1, 2):
            manager.save(step, {{"state": np.arange(step)}})
            manager.wait()
threading.Thread(target=train).start()
""",
    "not waited for": f"""
atexit.register(lambda: {RUN}.save(2, {{"state": np.arange(2)}}))
""",
}


@pytest.mark.parametrize("threads", nightly_after(1, [NO_THREADS, ""]), ids=["no threads", "threads"])
@pytest.mark.parametrize("script", SAVES_LATE.values(), ids=SAVES_LATE)
def test_saves_after_main_thread_are_committed(script: str, threads: str, tmp_path: Path, run_python: Any) -> None:
    before = "import atexit, sys, threading\nimport numpy as np\nimport jaxckpt_train as jct\n"
    done = run_python(before + threads + script, tmp_path, check=True, fresh=True)
    assert "ulimit" not in done.stderr
    assert jct.load(tmp_path / "run" / "step-0000000002").tolist() == [0, 1]


def test_failed_save_after_main_thread_exits_with_1(tmp_path: Path, run_python: Any) -> None:
    late = "atexit.register(lambda: start_save('x', lambda: 1 / 0))"
    before = "import atexit\nfrom jaxckpt_train.pending import start_save\n"
    done = run_python(before + NO_THREADS + late, tmp_path, fresh=True)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: ") == 1


GIVES_UP = """
import threading
from jaxckpt_train.pending import start_save
go, never = threading.Event(), threading.Event()
save = start_save("x", lambda: (go.wait(), {work}))
save.give_up(75)
def ends_late(seconds=0.05):  # the waiting thread continues before this one ends
    is_open = save._ended.open
    save._ended.open = lambda: (is_open(), never.wait(seconds))
{then}
"""


@pytest.mark.parametrize(
    ("work", "then", "code", "reports"),
    [
        ("1 / 0", "go.set(); save._thread.join()", 75, 1),
        ("1 / 0", "go.set(); save.outcome()", 0, 0),
        ("1 / 0", "ends_late(); go.set(); save.outcome()", 0, 0),
        ("1 / 0", "", 75, 0),
        ("1", "go.set(); save._thread.join()", 0, 0),
        ("1", "ends_late(); go.set(); save.outcome()", 0, 0),
        ("1", "ends_late(60); go.set(); save.outcome()", 75, 0),
        ("1", "", 75, 0),
    ],
)
def test_abandoned_save_fails_process_unless_it_commits(
    work: str, then: str, code: int, reports: int, run_python: Any
) -> None:
    done = run_python(GIVES_UP.format(work=work, then=then), fresh=True)
    assert done.returncode == code
    assert done.stderr.count("saving x failed") == reports


CHAINED = """
import sys, threading
from pathlib import Path
from jaxckpt_train import pending
from jaxckpt_train.pending import start_save
never = threading.Event()
def work():
    while not pending.process_is_ending():  # the end of the process waits for this one
        never.wait(0.01)
def begin_another(_):
    start_save("y", lambda: {work})
start_save("x", work).committed.add_done_callback(begin_another)
"""


@pytest.mark.parametrize(("work", "code"), [("Path(sys.argv[1]).touch()", 0), ("1 / 0", 1)])
def test_save_started_by_another_at_exit_is_awaited(work: str, code: int, tmp_path: Path, run_python: Any) -> None:
    done = run_python(CHAINED.format(work=work), tmp_path / "saved", timeout_s=60, fresh=True)
    assert (done.returncode, (tmp_path / "saved").exists()) == (code, code == 0), done.stderr
    assert done.stderr.count("ZeroDivisionError: ") == code


SAVES_FOR_EVER = """
import threading
from jaxckpt_train.pending import start_save
never, begun = threading.Event(), threading.Barrier(5)
def train():
    begun.wait()
    while True:
        start_save("x", lambda: never.wait(0.2)).wait()
for _ in range(4):  # one of them always does
    threading.Thread(target=train, daemon=True).start()
begun.wait()
never.wait(0.1)
"""


def test_saving_daemon_threads_do_not_delay_the_exit(run_python: Any) -> None:
    done = run_python(SAVES_FOR_EVER, timeout_s=60, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")


CAUGHT_AT_EXIT = """
import atexit, sys
def last():
    from jaxckpt_train.pending import start_save
    pending = start_save("x", lambda: 1 / 0)
    {see}
    start_save("y", int).wait()
    print("fallback saved")
import jaxckpt_train.pending
atexit.register(last)
"""


@pytest.mark.parametrize(("see", "code"), [("pending.committed.exception()", 0), ("pass", 1)])
def test_failure_seen_by_exit_function_keeps_exit_code(see: str, code: int, run_python: Any) -> None:
    done = run_python(CAUGHT_AT_EXIT.format(see=see), fresh=True)
    assert (done.returncode, done.stdout) == (code, "fallback saved\n"), done.stderr
    assert done.stderr.count("ZeroDivisionError: ") == code
