"""A run directory: which attempts its owner removes or leaves alone, and what a forked child may do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.forking import Tell, forked
from tests.support.runs import made_run, save_steps, state_of, talking_to

KILLED_WHILE_SAVING = """
import sys
import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend
from tests.support.runs import save_steps, state_of
backend = HoldingBackend("rename", "step-0000000002")
manager = jct.StepManager(sys.argv[1], backend=backend)
save_steps(manager, 1)
manager.save(2, {"state": state_of(2)})
backend.reached.wait()
print("all but committed", flush=True)
sys.stdin.readline()
"""
SAVING_AT_ONCE = """
import sys
import jaxckpt_train as jct
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.transaction import Transaction
Transaction(LocalBackend(), sys.argv[1] + "/export", StoreSettings()).add_folder("state")
print("begun", flush=True)
sys.stdin.readline()
"""


def names(directory: Path, part: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if part in name)


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A run with step 1, and an attempt at step 2 that was killed right before its commit."""
    with talking_to(KILLED_WHILE_SAVING, tmp_path) as saver:
        assert saver.read() == "all but committed"
    assert len(names(tmp_path, ".tmp-")) == 1
    return tmp_path


def test_next_owner_removes_interrupted_attempt(interrupted: Path) -> None:
    reader = jct.StepManager(interrupted)
    assert (reader.steps, len(names(interrupted, ".tmp-"))) == ([1], 1)
    reader.restore()
    assert len(names(interrupted, ".tmp-")) == 1
    with jct.StepManager(interrupted) as owner:
        owner.own()
        assert owner._run._deleter.wait(60)
        assert names(interrupted, ".tmp-") == []
        assert [event["event"] for event in owner.history.events()][-2:] == ["take_over", "start"]
        save_steps(owner, 2)
    assert reader.steps == [1, 2]


def test_foreign_attempts_are_left_alone(tmp_path: Path) -> None:
    """Another process saves a checkpoint with `jaxckpt_train.save` into the directory of a run."""
    (tmp_path / ".notes.tmp-1-0").mkdir()
    with talking_to(SAVING_AT_ONCE, tmp_path) as other:
        assert other.read() == "begun"
        before = names(tmp_path, ".tmp-")
        assert len(before) == 2
        with jct.StepManager(tmp_path) as owner:
            save_steps(owner, 1)
        assert names(tmp_path, ".tmp-") == before


def forked_while_held(guard: Any, work: Callable[[Tell], None]) -> Any:
    """What a child reports that is forked while another thread of its parent holds this guard."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    found = forked(work, longest_s=10)
    go.set()
    thread.join()
    return found


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_reads_in_any_state(tmp_path: Path) -> None:
    """The thread holds the guard as a save does while it records its commit."""
    manager = jct.StepManager(made_run(tmp_path, 1, 2))
    manager.own()

    def list_steps(tell: Tell) -> None:
        tell("steps", [manager.steps, manager.latest])

    found = forked_while_held(manager._run._guard, list_steps)
    manager.close()
    assert found == ([("steps", [[1, 2], 2])], 0)


@pytest.mark.parametrize("part", ["manager", "lock"])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_is_refused_in_any_state(tmp_path: Path, part: str) -> None:
    """The parent holds the guard as it does while it starts a save or takes the directory."""
    manager = jct.StepManager(made_run(tmp_path, 1))
    manager.own()

    def use(tell: Tell) -> None:
        with pytest.raises(jct.DirectoryLockedError, match="a forked child"):
            manager.save(2, {"state": state_of(2)})
        manager.close()
        tell("closed", [])

    found = forked_while_held(manager._guard if part == "manager" else manager._run._lock._guard, use)
    manager.close()
    assert found == ([("closed", [])], 0)
