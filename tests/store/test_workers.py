"""Worker threads: order, errors, interrupts, forks, and work while the interpreter exits."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.workers import Workers, shared_workers
from tests.store.checkpoints import load


def test_every_item_is_worked_on_once() -> None:
    done: list[int] = []
    Workers(3, "test").run_all(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_nothing_to_do_is_done_at_once() -> None:
    Workers(1, "test").run_all(pytest.fail, [])


def test_a_single_item_needs_no_other_thread_but_where_signals_are_handled() -> None:
    seen: list[threading.Thread] = []

    def run_one() -> None:
        Workers(1, "test").run_all(lambda _: seen.append(threading.current_thread()), [0])

    run_one()
    thread = threading.Thread(target=run_one)
    thread.start()
    thread.join()
    assert threading.main_thread() not in seen
    assert seen[1:] == [thread]


def test_as_many_items_run_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(4)
    Workers(4, "test").run_all(lambda _: together.wait(10), range(8))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt("first"), SystemExit("first")])
def test_the_first_error_is_raised_and_nothing_begins_after_it(error: BaseException) -> None:
    workers, begun = Workers(1, "test"), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        if item >= 3:
            raise error if item == 3 else ValueError("second")

    with pytest.raises(type(error), match="first"):
        workers.run_all(work, range(100))
    assert begun == [0, 1, 2, 3]
    workers.run_all(begun.append, [4, 5])
    assert begun == [0, 1, 2, 3, 4, 5]


def test_items_that_run_already_end_before_the_error_is_raised() -> None:
    failed, ended = threading.Event(), list[str]()

    def work(item: str) -> None:
        if item == "fails":
            together.wait()
            failed.set()
            raise ValueError("one of two")
        together.wait()
        failed.wait()
        ended.append(item)

    together = threading.Barrier(2)
    with pytest.raises(ValueError, match="one of two"):
        Workers(2, "test").run_all(work, ["fails", "goes on"])
    assert ended == ["goes on"]


def test_an_interrupt_waits_for_what_runs_and_begins_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the caller would close files that a thread still writes to."""
    handled, ended = queue.SimpleQueue[None](), list[int]()

    def interrupt(*_: Any) -> None:
        handled.put(None)
        raise KeyboardInterrupt("by hand")

    def work(item: int) -> None:
        if item == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            handled.get()
        for _ in range(1000):
            pass
        ended.append(item)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="by hand"):
            Workers(1, "test").run_all(work, range(5000))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended[0] == 0
    assert len(ended) < 5000


def test_workers_are_shared_by_purpose() -> None:
    one = shared_workers(2, "test-purpose")
    assert shared_workers(2, "test-purpose") is one
    assert shared_workers(3, "test-purpose") is not one


FORKED = """
import os, sys, warnings
import numpy as np
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.local import LocalBackend
from tests.store.checkpoints import commit
warnings.simplefilter("ignore")
arrays = {f"x{n}": np.arange(300_000) for n in range(8)}
tiny = StoreSettings(segment_bytes=1 << 20, staging_bytes=1 << 20)
commit(LocalBackend(), sys.argv[1] + "/parent", arrays, tiny)
child = os.fork()
if child == 0:
    commit(LocalBackend(), sys.argv[1] + "/child", arrays, tiny)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_its_own_threads(run_python: Any, tmp_path: os.PathLike[str]) -> None:
    run_python(FORKED, tmp_path, check=True, timeout_s=60)
    found = load(LocalBackend(), f"{tmp_path}/child", StoreSettings())
    assert np.array_equal(found["x7"][0], np.arange(300_000))


AT_EXIT = """
import sys
import numpy as np
import jaxckpt_train as jct
tree = {f"x{n}": np.arange(500_000) + n for n in range(8)}
settings = jct.StoreSettings(segment_bytes=1 << 20, staging_bytes=1 << 20)
pending = jct.save_async(sys.argv[1] + "/a", tree, settings=settings)
if sys.argv[2] == "raises":
    raise ZeroDivisionError("of the loop")
"""


@pytest.mark.parametrize("end", ["ends", "raises"])
def test_a_save_under_way_when_the_script_ends_is_committed(run_python: Any, tmp_path: Any, end: str) -> None:
    done = run_python(AT_EXIT, tmp_path, end)
    assert done.returncode == (1 if end == "raises" else 0), done.stderr
    assert ("ZeroDivisionError: of the loop" in done.stderr) is (end == "raises")
    found = load(LocalBackend(), f"{tmp_path}/a", StoreSettings())
    assert sorted(found) == [f"x{n}" for n in range(8)]
    assert np.array_equal(found["x5"][0], np.arange(500_000) + 5)
