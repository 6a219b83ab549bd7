"""A verification of a whole run reads a file that several steps share once, and still finds its damage in each."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.verify import IntactFiles, first_damage
from tests.support.commands import json_of, printed
from tests.support.runs import segment_of, step_path

BASE = 2 << 20
STEPS = (1, 2, 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose steps share one file of the given size."""
    base = jnp.full(BASE // 4, 7, jnp.float32)
    with jct.StepManager(tmp_path / "run", frozen="base") as manager:
        for step in STEPS:
            manager.save(step, {"state": {"base": base, "step": jnp.asarray(step)}})
            manager.wait()
    return tmp_path / "run"


def shared_file(run: Path) -> Path:
    (found,) = [file for file in step_path(run, 2).glob("*/*") if file.stat().st_nlink == len(STEPS)]
    return found


def damage(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\1")


def test_scrub_reads_shared_file_once(run: Path) -> None:
    assert printed("scrub", run).startswith("3 steps, 0 damaged, 2.0 MiB read")
    damage(shared_file(run))
    assert [each["damaged"] for each in json_of("scrub", run, code=1)["steps"]] == [True] * 3


def test_file_that_was_written_to_is_read_again(run: Path) -> None:
    intact, read = IntactFiles(), list[int]()
    assert first_damage(LocalBackend(), str(step_path(run, 1)), read.append, intact) is None
    assert sum(read) > BASE
    read.clear()
    assert first_damage(LocalBackend(), str(step_path(run, 2)), read.append, intact) is None
    assert sum(read) < BASE // 10
    assert intact.unread_bytes == shared_file(run).stat().st_size
    damage(shared_file(run))
    assert str(shared_file(run)).replace("02/", "03/") in str(
        first_damage(LocalBackend(), str(step_path(run, 3)), read.append, intact)
    )


def test_intact_file_that_is_not_the_expected_one_is_damage(tmp_path: Path) -> None:
    for number in STEPS:
        jct.save(tmp_path / f"step-{number:010d}", {"w": np.full(9, number)})
    first, second, third = (segment_of(step_path(tmp_path, number)) for number in STEPS)
    for file in (second, third):
        file.unlink()
        os.link(first, file)
    intact = IntactFiles()
    found = [first_damage(LocalBackend(), str(step_path(tmp_path, number)), None, intact) for number in STEPS]
    assert [each is None for each in found] == [True, False, False]


class Counting(Scrubber):
    """Counts what it may read."""

    read_bytes = 0

    def _pace(self, nbytes: int) -> None:
        self.read_bytes += nbytes

    def verify(self, count: int) -> int:
        """Verify this number of steps; returns how many bytes were read."""
        self.read_bytes = 0
        for _ in range(count):
            assert self._verify_next()
        return self.read_bytes


def test_scrubber_reads_shared_file_once_in_each_pass(run: Path) -> None:
    with jct.StepManager(run) as manager:
        manager.own()
        scrubber = Counting(LocalBackend(), str(run), 1, weakref.ref(manager._run))
        for _ in range(3):
            assert BASE < scrubber.verify(len(STEPS)) < 2 * BASE
        assert scrubber.verify(1) > BASE
        damage(shared_file(run))
        scrubber.verify(2 * len(STEPS))
        assert sorted(scrubber._damaged) == [step_path(run, step).name for step in STEPS]
        assert manager.damaged == [], "no step is intact"


def test_damage_of_all_steps_that_the_scrubber_finds_is_not_taken_over(run: Path) -> None:
    with jct.StepManager(run, frozen="base") as manager:
        state = manager.restore()["state"]
        manager.own()
        scrubber = Counting(LocalBackend(), str(run), 1, weakref.ref(manager._run))
        damage(shared_file(run))
        scrubber.verify(len(STEPS))
        for step in (4, 5):
            manager.save(step, {"state": {**state, "step": jnp.asarray(step)}})
            manager.wait()
            assert jct.verify(manager.path(step)).ok
        scrubber.verify(2)
        assert (manager.steps, manager.damaged) == ([4, 5], list(STEPS))
        assert manager.history.events()[-1]["event"] == "set_aside"
