"""Programs whose native calls are made to fail, and the checks of their results.

A program makes actions, and reports which were acknowledged. After an action that raises a `CheckpointError`, it
continues with the next one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends import local_names
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.transaction import Transaction
from tests.nightly.faults.known_states import KEPT, SETTINGS, checkpointables_of, step_in, token_in, token_of
from tests.support.forking import LONGEST_S, Tell, forked

Events = Mapping[str, list[Any]]
SINGLE, LATER = "single", 900  # a step after all that programs save


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, the check of its result, and a function that makes its initial content."""

    run: Callable[[Path, Tell], None]
    check: Callable[[Path, Events], list[str]]
    before: Callable[[Path, Tell], None] | None = None


def by_kind(lines: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all events by kind."""
    events = collections.defaultdict(list)
    for what, value in lines:
        events[what].append(value)
    return events


def manager_of(directory: Path) -> StepManager:
    """Return the manager of a run that keeps few steps."""
    return StepManager(directory, preservation_policy=LatestN(KEPT), settings=SETTINGS)


def done(tell: Tell, action: Callable[[], object]) -> bool:
    """Make an action; if it raises a CheckpointError, report it and return False."""
    try:
        action()
    except CheckpointError as error:
        tell("failed", str(error))
        return False
    return True


def save(tell: Tell, manager: StepManager, token: int, *, overwrite: bool = False) -> bool:
    """Save a step, and report its acknowledgement."""

    def action() -> None:
        manager.save(step_in(token), checkpointables_of(token), overwrite=overwrite)
        manager.wait(LONGEST_S)
        tell("acknowledged", token)

    return done(tell, action)


def restore(tell: Tell, manager: StepManager) -> bool:
    """Restore the newest step."""
    return done(tell, lambda: tell("restored", token_in(manager.restore())))


def pin(tell: Tell, manager: StepManager, step: int) -> bool:
    """Pin a step, if it is there."""

    def action() -> None:
        if step in manager.steps:
            manager.pin(step)
            tell("pinned", step)

    return done(tell, action)


def measure(tell: Tell, manager: StepManager, step: int) -> bool:
    """Attach metrics to a step, if it is there."""

    def action() -> None:
        if step in manager.steps:
            manager.attach_metrics(step, {"loss": 0.5})
            tell("measured", step)

    return done(tell, action)


def run_steps(directory: Path, tell: Tell) -> None:
    """Save with retention, and restore."""
    manager = manager_of(directory)
    for step in (1, 2, 3, 4):
        save(tell, manager, step)
    restore(tell, manager)
    done(tell, manager.close)


def run_notes(directory: Path, tell: Tell) -> None:
    """Pin and measure a step that retention would delete."""
    manager = manager_of(directory)
    save(tell, manager, 1)
    pin(tell, manager, 1)
    measure(tell, manager, 1)
    for step in (2, 3, 4):
        save(tell, manager, step)
    done(tell, manager.close)


def run_roll_back(directory: Path, tell: Tell) -> None:
    """Roll back to a step, and save new generations of the next step."""
    manager = manager_of(directory)
    for step in (1, 2, 3):
        save(tell, manager, step)
    if done(tell, lambda: manager.restore(step=2) if 2 in manager.steps else None):
        save(tell, manager, token_of(3, 1), overwrite=manager.restored_step != 2)
    save(tell, manager, token_of(3, 2), overwrite=True)
    save(tell, manager, token_of(4, 2))
    restore(tell, manager)
    done(tell, manager.close)


def run_take_over(directory: Path, tell: Tell) -> None:
    """Take over from an owner that died during a save."""
    manager = manager_of(directory)
    done(tell, manager.own)
    restore(tell, manager)
    for step in (3, 4):
        save(tell, manager, step)
    done(tell, manager.close)


def die_in_a_save(directory: Path, tell: Tell) -> None:
    """Save two steps, pin one, and die during the third save."""
    manager = manager_of(directory)
    save(tell, manager, 1)
    pin(tell, manager, 1)
    save(tell, manager, 2)
    Transaction(LocalBackend(), f"{directory}/step-0000000003", SETTINGS).write_file("begun", b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def run_replacement(directory: Path, tell: Tell, *, can_exchange: bool = True) -> None:
    """Save and replace one checkpoint; atomically if the kernel can exchange two names."""
    if not can_exchange:
        find = local_names._c_function
        without = pytest.MonkeyPatch()  # for the rest of this process; raises if the function was renamed
        without.setattr(local_names, "_c_function", lambda name: None if name == "renameat2" else find(name))
    path = directory / SINGLE

    def replace(token: int) -> None:
        checkpoint.save_checkpointables(path, checkpointables_of(token), overwrite=True, settings=SETTINGS)
        tell("acknowledged", token)

    for token in (1, 2, 3):
        done(tell, functools.partial(replace, token))
    done(tell, lambda: tell("restored", token_in(checkpoint.load_checkpointables(path, settings=SETTINGS))))


def inspect_run(directory: Path, events: Events) -> list[str]:
    """Return the problems of a run that the next owner finds."""
    problems = []
    newest, pinned = max(events.get("acknowledged", ()), default=0), set(events.get("pinned", ()))
    manager = manager_of(directory)
    manager.own()
    try:
        token = token_in(manager.restore())
    except StepNotFoundError:
        token = 0
    if token < newest:
        problems.append(f"restored save {token}, but {newest} was acknowledged")
    there = {step: token_in(checkpoint.load_checkpointables(manager.path(step))) for step in manager.steps}
    problems += [f"step {step} holds save {token}" for step, token in there.items() if step_in(token) != step]
    acknowledged = {step_in(token) for token in events.get("acknowledged", ())}
    if missing := ({*sorted({*acknowledged, *there})[-KEPT:]} | pinned) - set(there):
        problems.append(f"{sorted(missing)} are gone; there are {sorted(there)}")
    measured, kept = manager.best("loss"), [step for step in events.get("measured", ()) if step in there]
    if kept and measured not in kept:
        problems.append(f"of {kept} metrics were acknowledged, of {measured} there are some")
    for step in range(LATER, LATER + KEPT + 1):  # so that retention deletes every unpinned step
        manager.save(step, checkpointables_of(token_of(step, LATER)))
        manager.wait(LONGEST_S)
    if token_in(manager.restore()) != token_of(LATER + KEPT, LATER):
        problems.append("the next save is not what is restored")
    manager.close()
    if missing := pinned - set(manager.steps):
        problems.append(f"pinned steps are gone: {sorted(missing)}")
    return problems + left_over(directory)


def left_over(directory: Path) -> list[str]:
    """Return leftovers; temporary files of locks stay for a minute, because another process may use them."""
    harmless = (*TEMPORARY_PREFIXES, LOCK_NAME)
    left = [name for name in os.listdir(directory) if name.startswith(".") and not name.startswith(harmless)]
    return [f"left over: {', '.join(sorted(left))}"] if left else []


def inspect_single(directory: Path, events: Events) -> list[str]:
    """Return the problems of a single checkpoint that is loaded and replaced next."""
    problems, path, newest = [], directory / SINGLE, max(events.get("acknowledged", ()), default=0)
    try:
        token = token_in(checkpoint.load_checkpointables(path))
    except NotACheckpointError:
        token = 0
    if token < newest:
        problems.append(f"loaded save {token}, but {newest} was acknowledged")
    checkpoint.save_checkpointables(path, checkpointables_of(LATER), overwrite=True)
    if token_in(checkpoint.load_checkpointables(path)) != LATER:
        problems.append("the next save is not what is loaded")
    return problems + left_over(directory)


def checked(check: Callable[[Path, Events], list[str]], directory: Path, events: Events) -> list[str]:
    """Run a check in a forked process, and return the problems."""
    seen, status = forked(lambda tell: tell("problems", check(directory, events)))
    problems = [problem for what, value in seen for problem in (value if what == "problems" else [value])]
    return problems if status == 0 else [*problems, f"the check ended with {status}"]


PROGRAMS = {
    "steps": Program(run_steps, inspect_run),
    "notes": Program(run_notes, inspect_run),
    "roll-back": Program(run_roll_back, inspect_run),
    "take-over": Program(run_take_over, inspect_run, die_in_a_save),
    "replacement": Program(run_replacement, inspect_single),
    "replacement by renames": Program(functools.partial(run_replacement, can_exchange=False), inspect_single),
}
