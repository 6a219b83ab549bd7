"""Processes that own, read, pin, retain and die on one directory, in any order, against a plain model of it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import DirectoryLockedError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run import lock
from jaxckpt_train.store import process_identity as machine_module
from jaxckpt_train.store.process_identity import ProcessIdentity
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.crash.programs import LONGEST_S, RUN, die, on

pytestmark = pytest.mark.timeout(300)

KEEP = 2
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass
class Process:
    """One process that has the run open."""

    number: int
    disk: CrashDisk
    manager: StepManager


class Owners(RuleBasedStateMachine):
    """The model: the committed steps in the order of their last save, with their content, and the pinned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.machine, self.alive, self.acting = Machine(), set[int](), 0
        self.saved: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.tokens = self.processes = 0
        self.now = START
        self.owner: Process | None = None
        self.patch = pytest.MonkeyPatch()
        for module in (machine_module, lock):
            self.patch.setattr(module, "this_process", lambda: ProcessIdentity("here", self.acting, "1", "boot", "all"))
            self.patch.setattr(module, "is_dead", lambda other: other.pid not in self.alive)

    def _started(self) -> Process:
        self.processes += 1
        self.acting = self.processes
        self.alive.add(self.processes)
        disk = CrashDisk(self.machine)
        manager = StepManager(
            RUN,
            preservation_policy=LatestN(KEEP),
            clock=lambda: self.now,
            backend=disk,  # type: ignore[arg-type]
        )
        return Process(self.processes, disk, manager)

    def _end(self, process: Process, *, kill: bool) -> None:
        self.acting = process.number
        if kill:
            die(process.disk, process.manager)
        else:
            process.manager.close()
        self.alive.discard(process.number)

    @precondition(lambda self: self.owner is None)
    @rule()
    def become_owner(self) -> None:
        process = self._started()
        process.manager.own()
        self.owner = process
        self._restored(process.manager)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def a_second_owner_is_refused(self) -> None:
        other = self._started()
        with pytest.raises(DirectoryLockedError):
            other.manager.own()
        self._end(other, kill=False)

    @rule(kill=st.booleans())
    def read(self, kill: bool) -> None:
        reader = self._started()
        assert sorted(reader.manager.steps) == sorted(self.saved)
        self._restored(reader.manager)
        for step, token in self.saved.items():
            assert token_of(reader.manager.restore(step=step)) == token
        self._end(reader, kill=kill)

    @precondition(lambda self: self.owner is not None)
    @rule(ahead=st.integers(1, 3), overwrite=st.booleans())
    def save(self, ahead: int, overwrite: bool) -> None:
        assert self.owner is not None
        self.acting = self.owner.number
        latest = self.owner.manager.latest
        step = latest if overwrite and latest is not None else (latest or 0) + ahead
        self.tokens += 1
        self.owner.manager.save(step, state_of(self.tokens), overwrite=overwrite)
        self.owner.manager.wait(LONGEST_S)
        assert self.owner.manager._run._deleter.wait(LONGEST_S)
        self.saved.pop(step, None)
        self.saved[step] = self.tokens
        kept = list(self.saved)[-KEEP:]
        self.saved = {each: token for each, token in self.saved.items() if each in kept or each in self.pinned}

    @precondition(lambda self: self.owner is not None and self.saved)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: Any, pinned: bool) -> None:
        assert self.owner is not None
        self.acting = self.owner.number
        step = data.draw(st.sampled_from(sorted(self.saved)))
        self.owner.manager.pin(step, pinned)
        (self.pinned.add if pinned else self.pinned.discard)(step)

    @precondition(lambda self: self.owner is not None)
    @rule(kill=st.booleans())
    def end(self, kill: bool) -> None:
        assert self.owner is not None
        owner, self.owner = self.owner, None
        self._end(owner, kill=kill)

    @rule(days=st.integers(-400, 400))
    def set_clock(self, days: int) -> None:
        self.now = START + datetime.timedelta(days=days)

    @precondition(lambda self: self.owner is not None)
    @rule(data=st.data())
    def a_reader_keeps_what_it_has_opened(self, data: Any) -> None:
        """The owner deletes the step while it is read."""
        assert self.owner is not None
        if not self.saved:
            return
        reader = self._started()
        step = data.draw(st.sampled_from(sorted(self.saved)))
        directory = f"{RUN}/" + next(e.name for e in reader.manager._run.newest() if e.step == step)
        token = self.saved[step]

        def delete_it(done: int) -> None:
            """Called when the first bytes are read: all files of all checkpointables are open by then."""
            if done and step in self.saved and not self.pinned:
                self.save(ahead=1, overwrite=False)
                self.save(ahead=1, overwrite=False)

        with on(reader.disk):
            found = checkpoint.load_checkpointables(directory, progress=delete_it)
        assert token_of(found) == token
        expected = state_of(token)["state"]
        assert {name: leaf.tobytes() for name, leaf in found["state"].items()} == {
            name: array.tobytes() for name, array in expected.items()
        }
        self._end(reader, kill=False)

    def _restored(self, manager: StepManager) -> None:
        if not self.saved:
            with pytest.raises(StepNotFoundError):
                manager.restore()
            return
        assert token_of(manager.restore()) == list(self.saved.values())[-1]

    @invariant()
    def nothing_is_left_over(self) -> None:
        if self.owner is not None:
            names = [entry.name for entry in self.owner.disk.list(RUN)]
            left = [name for name in names if name.startswith(".") and name != lock.LOCK_NAME]
            assert left == []

    def teardown(self) -> None:
        if self.owner is not None:
            with contextlib.suppress(Exception):
                self._end(self.owner, kill=True)
        self.patch.undo()


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
