"""Crash at every request of programs on object stores: `python -m tests.nightly.objects.crashes [--controls]`.

Modes: "dies" stops the process at a request, without and with its effect. In the others the process goes on: "lost"
drops the response of one request, "retried" lets the client repeat it, "blind" also fails the next request, "failed"
refuses one, and "late" and "twice" let one take effect after another process has taken over, alone or once more. Then a
new process checks all promises. Some of these new processes die, too, at each of their requests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import gc
import itertools
import logging
import random
import time
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import pytest

from jaxckpt_train.errors import CheckpointError, StepNotFoundError
from jaxckpt_train.run.entry import parse_step_name
from jaxckpt_train.store.committed import is_data_folder
from tests.nightly.crash.facts import Facts, WrongContentError, token_of
from tests.nightly.crash.oracles import problems_in_run, problems_of_single
from tests.nightly.crash.problems import Problem
from tests.nightly.crash.programs import process
from tests.nightly.objects.crash_flaws import FLAWS
from tests.nightly.objects.crash_programs import (
    LONGEST_S,
    PROGRAMS,
    Recorder,
    Snapshot,
    World,
    on_single,
    opened,
)
from tests.support.objects.faults import Action, Fail, LoseResponse, Refuse, Request
from tests.support.objects.object_map import ObjectMap
from tests.support.objects.runs import keys

Mode = Literal["dies", "lost", "retried", "blind", "failed", "late", "twice"]
MODES: tuple[Mode, ...] = get_args(Mode)
CONDITIONAL = {"put_create", "put_update"}
_pids = itertools.count(1_000_000)


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken promise, and the request that reproduces it."""

    program: str
    mode: Mode
    request: str
    problem: Problem


@dataclasses.dataclass
class Found:
    """The number of states by mode, and the violations."""

    states: dict[str, int] = dataclasses.field(default_factory=dict)
    violations: list[Violation] = dataclasses.field(default_factory=list)

    def add(self, program: str, mode: Mode, request: str, problems: Sequence[Problem], how: str = "") -> None:
        """Count a state, and keep its problems."""
        name = f"{mode}{how}"
        self.states[name] = self.states.get(name, 0) + 1
        self.violations += [Violation(program, mode, request, problem) for problem in problems]


class Fault:
    """The faults of one mode at the n-th request."""

    def __init__(self, mode: Mode, number: int) -> None:
        self._mode, self._number = mode, number
        self.hit: Request | None = None

    def decide(self, request: Request) -> Action | None:
        if request.number == self._number:
            self.hit = request
            refused: Action = Fail(500) if self._mode == "failed" else Refuse()
            actions: dict[Mode, Action | None] = {"failed": refused, "late": refused, "twice": None}
            return actions.get(self._mode, LoseResponse())
        return Fail(500) if self._mode == "blind" and request.number == self._number + 1 else None


class Campaign:
    """Runs programs on one server. Each `every`-th request of a program is a crash."""

    def __init__(self, server: Recorder, every: int = 1, seed: int = 0, deeper: int = 0) -> None:
        self._server, self._every, self._deeper = server, every, deeper
        self._chance = random.Random(seed)
        self.found = Found()

    def run(self, program: str, modes: Sequence[Mode] = MODES) -> None:
        """Check the states of one program in these modes."""
        if "dies" in modes:
            self._deaths(program)
        for mode in modes:
            if mode != "dies":
                number = self._chance.randrange(self._every) + 1
                while self._lives(program, mode, number):
                    number += self._every

    def _deaths(self, program: str) -> None:
        """Record the program once: a process that dies at a request leaves what is stored at that moment."""
        world = self._new_world(program)
        self._server.records = True
        PROGRAMS[program].run(world)
        self._server.records = False
        if world.errors:
            raise world.errors[0]
        requests, seen = list(self._server.requests), set()
        start = self._chance.randrange(self._every)
        for snapshot in self._server.snapshots[start :: self._every]:
            facts = world.facts.until(snapshot.number - 1)
            key = (snapshot.key, repr(facts.acknowledged()), repr(facts.pins))
            if key in seen:
                continue
            seen.add(key)
            goes_deeper = self._deeper > 0 and self._chance.randrange(self._deeper) == 0
            problems, later = self._check(program, snapshot.objects, facts, records=goes_deeper)
            self.found.add(program, "dies", _shown(requests[snapshot.number - 1], snapshot.is_after), problems)
            self._deaths_of_check(program, facts, later)

    def _deaths_of_check(self, program: str, facts: Facts, snapshots: Sequence[Snapshot]) -> None:
        """Check again what a checking process has left at each of its requests."""
        seen = set()
        for snapshot in snapshots:
            if snapshot.key not in seen:
                seen.add(snapshot.key)
                problems, _ = self._check(program, snapshot.objects, _before_check(facts))
                self.found.add(program, "dies", f"request {snapshot.number} of the check", problems, " twice")

    def _lives(self, program: str, mode: Mode, number: int) -> bool:
        """Run the program with one fault, and check; return whether it makes that many requests."""
        world = self._new_world(program, retries=1 if mode == "retried" else 0)
        self._server.faults = fault = Fault(mode, number)
        self._server.deferred = number if mode in ("late", "twice") else 0
        PROGRAMS[program].run(world)
        if fault.hit is None:
            return False
        self._server.faults = None
        problems = _refused(fault.hit, mode, world.errors)
        facts = world.facts.until(world.now())
        found, _ = self._check(program, None, facts)
        self.found.add(program, mode, _shown(fault.hit, True), problems + found)
        return True

    def _new_world(self, program: str, retries: int = 0) -> World:
        self._server.restart(ObjectMap())
        return World(self._server, PROGRAMS[program].keep, retries)

    def _check(
        self, program: str, objects: ObjectMap | None, facts: Facts, *, records: bool = False
    ) -> tuple[list[Problem], list[Snapshot]]:
        """Check what is stored (None: at the server), as a new process; also return what is stored meanwhile."""
        if objects is not None:
            self._server.restart(objects)
        world = World(self._server, facts.keep)
        world.facts = facts
        self._server.records = records
        with process(next(_pids)):
            try:
                problems = (problems_of_one if program == "single" else problems_of_run)(world)
            except Exception as error:  # noqa: BLE001  # any error after a crash is a violation
                kind = "wrong bytes" if isinstance(error, WrongContentError) else "exception"
                problems = [Problem(kind, f"{type(error).__name__}: {error}")]  # type: ignore[arg-type]
        self._server.records = False
        return problems, self._server.snapshots


def _before_check(facts: Facts) -> Facts:
    """The promises, of which those to the check itself were not acknowledged."""
    now = 1 << 61
    before = [
        dataclasses.replace(each, begun=0, acknowledged=None)
        if each.acknowledged is None or each.acknowledged > now
        else each
        for each in facts.promises
    ]
    return dataclasses.replace(facts, promises=before)


def _shown(request: Request, is_after: bool) -> str:
    return f"{'after' if is_after else 'before'} {request.number}: {request.kind} {request.key}"


def _refused(request: Request, mode: Mode, errors: Sequence[CheckpointError]) -> list[Problem]:
    """The problem of an operation that failed although its conditional write has had its effect."""
    if mode in ("lost", "retried") and request.kind in CONDITIONAL and errors:
        return [Problem("exception", f"its response was lost, but: {errors[0]}")]
    return []


def problems_of_run(world: World) -> list[Problem]:
    """The problems of a run: half steps, lost steps and pins, wrong bytes, leftovers, a next save that fails."""
    problems = _half_steps(world)
    manager = opened(world, world.facts.keep)
    deleter = manager._run._deleter

    def names() -> list[str]:
        for clean_up in (deleter.look_back, deleter.remove_due):
            clean_up()
            deleter.wait(LONGEST_S)
        found = {key.partition("/")[0] for key in keys(world.server.objects, "run")}
        return [name for name in found if parse_step_name(name) is not None or name.startswith(".jaxckpt")]

    try:
        if not problems:
            manager.own()
            with contextlib.suppress(StepNotFoundError):
                manager.restore()
            world.server.deliver()
            problems = problems_in_run(manager, world.facts, names, lambda: opened(world, world.facts.keep))
        return problems or _half_steps(world)
    finally:
        manager.close()
        manager._run._lock._stop.open()


def _half_steps(world: World) -> list[Problem]:
    """The problems of steps that a new reader lists."""
    problems, reader = [], opened(world)
    for step in reader.steps:
        try:
            token_of(reader.load(step=step))
        except CheckpointError as error:
            problems.append(Problem("damaged", f"step {step} is listed, but: {error}"))
    return problems


def problems_of_one(world: World) -> list[Problem]:
    """The problems of a single checkpoint."""
    url = world.server.url("one")

    def names() -> list[str]:
        found = {key.partition("/")[0] for key in keys(world.server.objects, "one")}
        folders = [name for name in found if is_data_folder(name)]
        return folders if len(folders) != 1 else []

    with on_single(world):
        problems = problems_of_single(url, world.settings(), world.facts, names)
        world.server.deliver()
        return problems or problems_of_single(url, world.settings(), world.facts, names)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable the log, which has a warning for each fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)
        yield


def found_flaw(server: Recorder, name: str, every: int = 1) -> Found:
    """Check a weakened program with the modes that must find its flaw; stop at the first violation."""
    flaw = FLAWS[name]
    campaign = Campaign(server, every)
    with pytest.MonkeyPatch.context() as patch:
        flaw.weaken(patch)
        for program, mode in flaw.tried:
            campaign.run(program, [mode])
            if campaign.found.violations:
                break
    return campaign.found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="crash at each N-th request")
    parser.add_argument("--deeper", type=int, default=20, help="let each N-th checking process die, too; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--controls", action="store_true", help="weaken the protocol; each flaw must be found")
    chosen = parser.parse_args()
    started, failed = time.monotonic(), False
    gc.freeze()
    with quiet(), Recorder() as server:
        if chosen.controls:
            for name in FLAWS:
                found = found_flaw(server, name)
                failed = failed or not found.violations
                print(f"{name}: {found.violations[0] if found.violations else 'NOT FOUND'}", flush=True)
        else:
            campaign = Campaign(server, chosen.every, chosen.seed, chosen.deeper)
            for program in chosen.programs:
                campaign.run(program)
                took_s = time.monotonic() - started
                print(f"{took_s:.0f} s, {program}: {campaign.found.states} in all", flush=True)
            for violation in campaign.found.violations:
                print(f"  {violation}")
            failed = bool(campaign.found.violations)
            print(f"{sum(campaign.found.states.values())} states, {len(campaign.found.violations)} violations")
    if failed:
        raise SystemExit(errno.EPERM)


if __name__ == "__main__":
    main()
