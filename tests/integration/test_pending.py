"""A save under way: its futures, its errors, and the end of the script."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct

SCRIPT = """
import atexit, os, signal, sys, threading, traceback
atexit.register(print, "registered before the import")
import numpy as np
import jaxckpt_train as jct
from tests.unit.checkpointables.test_stateful import Failing, Tokenizer
atexit.register(print, "registered after the import")
path = sys.argv[1]
large = {"w": np.arange(1 << 20), "m": [np.ones(1000) for _ in range(100)]}
"""


def run(run_python: Any, path: Path, script: str) -> Any:
    return run_python(SCRIPT + script, path)


def test_a_script_that_ends_without_waiting_still_saves(tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", "for n in range(3): jct.save_async(f'{path}{n}', large)")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == "registered after the import\nregistered before the import\n"
    assert all(jct.verify(f"{tmp_path / 'c'}{number}").ok for number in range(3))


@pytest.mark.parametrize(
    ("ending", "code"), [("raise ValueError('of the loop')", 1), ("sys.exit(75)", 75), ("sys.exit('message')", 1)]
)
def test_however_script_ends_save_is_finished_first(ending: str, code: int, tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", f"jct.save_async(path, large)\n{ending}")
    assert done.returncode == code
    assert "jaxckpt" not in done.stderr
    assert done.stderr.count("Traceback") == ending.startswith("raise")
    assert jct.verify(tmp_path / "c").ok


FAILURE = "jct.save_checkpointables_async(path, {'t': Failing('background')})\n"


def test_unseen_failure_is_reported_at_exit(tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", FAILURE + "print('the loop went well')")
    assert done.returncode == 1
    assert f"saving {tmp_path / 'c'} failed" in done.stderr
    assert "ConnectionError" in done.stderr
    assert done.stdout.splitlines() == [
        "the loop went well",
        "registered after the import",
        "registered before the import",
    ]
    assert list(tmp_path.iterdir()) == []


def test_failure_hides_no_other_save_or_error(tmp_path: Path, run_python: Any) -> None:
    script = (
        "jct.save_async(path + '1', large)\n" + FAILURE + "jct.save_async(path + '2', large)\nraise ValueError('mine')"
    )
    done = run(run_python, tmp_path / "c", script)
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "ConnectionError" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c1", "c2"]
    assert all(jct.verify(path).ok for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "seen", ["try: save.wait()\nexcept ConnectionError: print('seen')", "print(save.outcome() and 'seen')"]
)
def test_seen_failure_is_not_reported_again(seen: str, tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", f"save = {FAILURE}{seen}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("seen\n")


INTERRUPTED = """
from jaxckpt_train import pending
release, caught = threading.Event(), threading.Event()
signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background of a shell, it would be ignored

class Slow(Tokenizer):
    async def _write(self, directory, text):
        while not caught.wait(0.2):  # repeat it, since an interrupt during a garbage collection is lost
            os.kill(os.getpid(), signal.SIGINT)
        release.wait()
        await super()._write(directory, text)

try:
    jct.save_checkpointables_async(path, {"t": Slow({"a": 1}), "large": large}).wait()
except KeyboardInterrupt:
    caught.set()
    print("interrupted", len(pending.under_way), "under way")
atexit.register(release.set)  # runs before the save is waited for
"""


def test_interrupting_wait_does_not_give_up_save(tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", INTERRUPTED)
    assert done.stdout.startswith("interrupted 1 under way\n"), done.stderr
    assert done.returncode == 0
    assert jct.verify(tmp_path / "c").ok


FORKED = """
import warnings
warnings.simplefilter("ignore")
release = threading.Event()

class Slow(Tokenizer):
    async def _write(self, directory, text):
        release.wait()
        await super()._write(directory, text)

save = jct.save_checkpointables_async(path, {"t": Slow({"a": 1})})
child = os.fork()
if child == 0:
    try:
        save.wait()
    except jct.CheckpointTimeoutError as error:
        assert "is a fork of it" in str(error)
    else:
        os._exit(1)
    jct.save(path + "child", {"w": np.ones(3)})
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
release.set()
"""


def test_forked_child_waits_only_for_own_saves(tmp_path: Path, run_python: Any) -> None:
    done = run(run_python, tmp_path / "c", FORKED)
    assert done.returncode == 0, done.stderr
    assert jct.verify(tmp_path / "c").ok
    assert jct.verify(tmp_path / "cchild").ok


def test_sigterm_without_handler_leaves_only_what_was_committed(tmp_path: Path, run_python: Any) -> None:
    script = "jct.save(path, large)\njct.save_async(path + '2', large)\nos.kill(os.getpid(), signal.SIGTERM)"
    done = run(run_python, tmp_path / "c", script)
    assert done.returncode == -signal.SIGTERM
    assert jct.verify(tmp_path / "c").ok
    if os.path.exists(tmp_path / "c2"):
        assert jct.verify(tmp_path / "c2").ok
    jct.save(tmp_path / "c2", {"w": 1}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c2"]  # what the dead attempt left is gone
