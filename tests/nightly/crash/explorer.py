"""Search for crash states that break a promise: `python -m tests.nightly.crash.explorer --states 1000000`.

A program runs a few processes on a disk in memory that logs all operations. Then the power fails at random moments, the
disk loses a random part of what it may lose, and a new process checks the promises. Some of these new processes crash
too, and so on. Each distinct state is checked and counted once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from jaxckpt_train.settings import Durability, StoreSettings
from jaxckpt_train.store import timeouts
from jaxckpt_train.store.threads import Workers
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.facts import Facts, WrongContentError
from tests.nightly.crash.image import Image
from tests.nightly.crash.oracles import found_in_run, found_single
from tests.nightly.crash.problems import Kind, Problem
from tests.nightly.crash.programs import RunLife, SingleLife, World, note_durable, process
from tests.nightly.crash.states import Order, crash_state
from tests.nightly.crash.write_modes import found_in_weaker_run, found_in_weaker_single

MOMENTS = 150
DEEPEST = 3
SEEDS_APART = 1_000_000_000
SETTINGS: dict[str, Any] = {"staging_bytes": 1 << 16, "segment_bytes": 8192, "io_threads": 1}


@dataclasses.dataclass(frozen=True)
class Program:
    """The operations on a disk, the write mode, the check after a crash, and the share of all states."""

    life: type[RunLife] | type[SingleLife]
    durability: Durability
    find: Callable[[CrashDisk, World, Facts], list[Problem]]
    share: float


PROGRAMS = {
    "run": Program(RunLife, "full", found_in_run, 0.6),
    "single": Program(SingleLife, "full", found_single, 0.16),
    "run-file": Program(RunLife, "file", found_in_weaker_run, 0.1),
    "run-none": Program(RunLife, "none", found_in_weaker_run, 0.1),
    "single-file": Program(SingleLife, "file", found_in_weaker_single, 0.02),
    "single-none": Program(SingleLife, "none", found_in_weaker_single, 0.02),
}


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken promise, and the values that reproduce it."""

    program: str
    seed: int
    order: str
    moment: int
    problem: Problem


@dataclasses.dataclass
class Found:
    """The result of an exploration: the number of states, the digests of distinct ones, and the violations."""

    states: int = 0
    violations: list[Violation] = dataclasses.field(default_factory=list)
    seen: set[bytes] = dataclasses.field(default_factory=set)

    @property
    def distinct(self) -> int:
        """The number of distinct states that were checked."""
        return len(self.seen)

    def has(self, wanted: int | Collection[Kind]) -> bool:
        """Return whether this number of violations was found, or one of these kinds."""
        if isinstance(wanted, int):
            return len(self.violations) >= wanted
        return any(violation.problem.kind in wanted for violation in self.violations)


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """Allow small segments, and disable the log."""
    logger = logging.getLogger("jaxckpt_train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxckpt_train.settings.check_fields", lambda subject, settings: None)  # allows small sizes
        patch.setattr(logger, "disabled", True)
        yield


def explore(
    seed: int,
    states: int,
    *,
    program: str = "run",
    world: World | None = None,
    stop_at: int | Collection[Kind] = 5,
) -> Found:
    """Check a number of distinct states; stop early at a number of violations, or at one of these kinds."""
    found = Found()
    for number in itertools.count(seed):
        _one_program(number, program, world, found, states)
        if found.distinct >= states or found.has(stop_at):
            return found
    raise AssertionError("unreachable: the count has no end")


def _one_program(seed: int, program: str, world: World | None, found: Found, states: int) -> None:
    chance = random.Random(seed)
    chosen = world or _world(chance, PROGRAMS[program].durability)
    facts = Facts(keep=chance.choice((None, 1, 2)))
    start, identity = Image(), itertools.count(1000)
    for boot in range(DEEPEST):
        machine = Machine(start.copy(), can_exchange=chosen.can_exchange)
        for _ in range(chance.randint(1, 3)):
            problems = _live(program, machine, facts, chosen, chance, (next(identity), boot))
            if problems:
                found.violations += [
                    Violation(program, seed, chosen.order, len(machine.log), each) for each in problems
                ]
                return
        log = list(machine.log)
        if PROGRAMS[program].durability != "full":
            note_durable(facts, start, log, chosen.order)
        for _ in range(MOMENTS):
            moment = chance.randint(0, len(log))
            image = crash_state(start, log, moment, chosen.order, chance)
            found.states += 1
            key = image.digest(repr(facts.until(moment)).encode())
            if key in found.seen:
                continue
            found.seen.add(key)
            problems = _check(program, image.copy(), facts.until(moment), chosen, (next(identity), boot + 1))
            found.violations += [Violation(program, seed, chosen.order, moment, problem) for problem in problems]
            if problems or found.distinct >= states:
                return
        start, facts = image, facts.until(moment)


def _world(chance: random.Random, durability: Durability) -> World:
    order: Order = chance.choice(("ordered", "any"))
    return World(StoreSettings(**SETTINGS, durability=durability), order, can_exchange=chance.random() < 0.7)


def _live(
    program: str, machine: Machine, facts: Facts, world: World, chance: random.Random, identity: tuple[int, int]
) -> list[Problem]:
    with process(*identity):
        try:
            PROGRAMS[program].life(machine, facts, world, chance).live()
        except Exception as error:  # noqa: BLE001  # see _check
            return [_problem_of(error)]
    return []


def _check(program: str, image: Image, facts: Facts, world: World, identity: tuple[int, int]) -> list[Problem]:
    machine = Machine(image, can_exchange=world.can_exchange)
    with process(*identity), without_threads():
        try:
            return PROGRAMS[program].find(world.make_disk(machine), world, facts)
        except Exception as error:  # noqa: BLE001  # any error after a crash is a violation
            return [_problem_of(error)]


def _problem_of(error: Exception) -> Problem:
    kind: Kind = "wrong bytes" if isinstance(error, WrongContentError) else "exception"
    return Problem(kind, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Run all work in the calling thread, which is faster; nothing crashes during a check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "_is_started", lambda _: False)
        patch.setattr(Workers, "_start_missing", lambda _: False)
        yield


def explore_in_processes(seed: int, states: int, *, program: str, processes: int) -> Found:
    """Run `explore` in several processes with different seeds."""
    whole = Found()
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        share = -(-states // processes)
        parts = [pool.submit(_part, seed + number * SEEDS_APART, share, program) for number in range(processes)]
        for part in parts:
            found = part.result()
            whole.states += found.states
            whole.seen |= found.seen
            whole.violations += found.violations
    return whole


def _part(seed: int, states: int, program: str) -> Found:
    gc.freeze()  # exclude imported modules from collections
    with small_sizes():
        return explore(seed, states, program=program)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=1_000_000, help="distinct states to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    started, failed = time.monotonic(), False
    for program in PROGRAMS:
        states = int(chosen.states * PROGRAMS[program].share)
        found = explore_in_processes(chosen.seed, states, program=program, processes=chosen.processes)
        print(f"{program}: {found.distinct} different states of {found.states}, {len(found.violations)} violations")
        for violation in found.violations:
            print(f"  {violation}")
        failed = failed or bool(found.violations)
    print(f"{time.monotonic() - started:.0f} s, seed {chosen.seed}, {chosen.processes} processes")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
