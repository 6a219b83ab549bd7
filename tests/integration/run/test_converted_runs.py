"""Runs of an earlier version are converted once, also if the converting process is killed or is not alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.catalog import scan, scan_with_record
from jaxckpt_train.run.record import NOTES_NAME
from jaxckpt_train.store.backends.local import LocalBackend
from tests.conftest import RunPython
from tests.support.paths import GOLDEN
from tests.support.runs import talking_to

KILLED = """
import os, signal, sys
from jaxckpt_train.manager import StepManager
from jaxckpt_train.store.backends.local import LocalBackend

class Killed(LocalBackend):
    count = 0

    def _pass(self, path):
        if "record" in path or "notes" in path:
            if Killed.count == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            Killed.count += 1

    def create(self, path, *, direct):
        self._pass(path)
        return super().create(path, direct=direct)

    def write_new(self, path, data):
        self._pass(path)
        return super().write_new(path, data)

    def make_directory(self, path, *, parents, sync):
        self._pass(path)
        super().make_directory(path, parents=parents, sync=sync)

    def rename(self, source, target):
        self._pass(target)
        super().rename(source, target)

    def sync(self, path):
        self._pass(path)
        super().sync(path)

    def remove(self, path):
        self._pass(path)
        super().remove(path)

StepManager(sys.argv[1], backend=Killed()).own()
print(Killed.count)
"""


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "run_with_notes", tmp_path / "runs" / "a"))


def content(run: Path) -> list[tuple[object, ...]]:
    return [
        (entry.step, entry.pinned, entry.is_held, entry.damaged, str(entry.metrics))
        for entry in scan(LocalBackend(), str(run))
    ]


def test_killed_conversion_loses_nothing(old_run: Path, tmp_path: Path, run_python: RunPython) -> None:
    """Kill the owner before each of its operations on the record and the notes; the next owner converts the run."""
    expected = content(old_run)
    assert [row[:3] for row in expected] == [(step, step == 1, False) for step in (1, 2, 3, 4, 5, 8, 9)]
    total = None
    for number in range(100):
        run = Path(shutil.copytree(old_run, tmp_path / f"killed-{number}"))
        ended = run_python(KILLED, run, str(number), check=False, timeout_s=60)
        assert content(run) == expected, number
        with jct.StepManager(run) as manager:
            manager.own()
            manager.pin(3)
        assert not (run / NOTES_NAME).exists()
        assert content(run) == [(step, pinned or step == 3, *rest) for step, pinned, *rest in expected]
        if ended.returncode == 0:
            total = int(ended.stdout)
            break
        assert ended.returncode == -9
    assert total == number
    assert total >= 4


OWNER = """
import sys
from jaxckpt_train.manager import StepManager

manager = StepManager(sys.argv[1])
try:
    manager.own()
    print("owner", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
print(manager.steps, flush=True)
manager.close()
"""


def test_two_processes_open_an_old_run(old_run: Path) -> None:
    with talking_to(OWNER, old_run) as one, talking_to(OWNER, old_run) as other:
        assert {one.read(), other.read()} == {"owner", "DirectoryLockedError"}
        for talker in (one, other):
            talker.tell("")
        assert one.read() == other.read() == "[1, 2, 3, 4, 8, 9]"
        assert one.process.wait() == other.process.wait() == 0
    entries, found = scan_with_record(LocalBackend(), str(old_run))
    assert (found.problem, found.has_notes, found.record.pins) == (None, False, {1})
    assert len(entries) == 7
