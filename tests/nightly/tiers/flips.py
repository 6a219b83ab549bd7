"""Flip a byte of a step of the fast tier: `python -m tests.nightly.tiers.flips [--trials 10000]`.

A job of four hosts saves steps, once for each redundancy. In each trial one byte of a file of the newest step changes
on one host, and in half of them another host is lost. Then this process restores the run, with the directory of one
host, or of a new one; the others are served over loopback. The bytes must be right. The step must be the newest one,
unless a host is lost and there is no second copy of the damaged data: then it may be the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.store.backends.peers import FileServer, Peer
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.tiers.fast_tier import FastTier
from jaxckpt_train.tiers.host_files import LAYOUT_NAME, Layout
from tests.support.jobs import fast
from tests.support.jobs.job import running

REDUNDANCIES = ("partner", "xor", "p+q")
HOSTS, OLDER, NEWEST = 4, 11, 12
STEPS = [9, 10, OLDER, NEWEST]
TOKEN = b"t" * 32
METADATA = {COMMIT_NAME: "COMMIT", MANIFEST_NAME: "manifest", LAYOUT_NAME: "layout"}


@dataclasses.dataclass(frozen=True)
class Host:
    """The directory of one host, and how others read it."""

    tier: FastTier
    peer: Peer

    @property
    def newest(self) -> Path:
        """What the host has of the newest step."""
        return next(Path(self.tier.directory).glob(f"step-{NEWEST:010}*"))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose steps are on all hosts."""

    redundancy: str
    folder: Path
    hosts: tuple[Host, ...]
    layout: Layout

    @property
    def slow(self) -> str:
        """The directory of the run."""
        return str(self.folder / "slow")

    def kind_of(self, host: int, path: str) -> str:
        """What a file of the newest step is on a host."""
        if path.startswith(".tier-"):
            return "parity"
        return METADATA.get(path) or ("own" if self.layout.writer_of(path) == host else "copy")

    def restored(self, reader: str, others: list[Host], times: int, settings: jct.StoreSettings) -> list[int]:
        """Restore several times with the directory of one host; return the steps, -1 for wrong bytes."""
        tier = jct.FastTierSettings(directory=str(self.folder / "fast" / reader))
        found = list[int]()
        with jct.StepManager(self.slow, fast_tier=tier, settings=settings) as manager:
            assert manager._fast is not None
            here = manager._fast.tier
            here.look = functools.partial(look, here, {each.peer: each.tier for each in others})  # type: ignore[method-assign]
            for _ in range(times):
                state = manager.restore({"state": targets()})["state"]
                step = int(manager.restored_step or 0)
                is_right = all(np.array_equal(state[name], value) for name, value in values(step).items())
                found.append(step if is_right else -1)
        return found


def look(here: FastTier, others: Mapping[Peer, FastTier], job: Coordinator) -> dict[str, bool]:
    """As `FastTier.look`, with hosts that are no processes of the job."""
    own, held = here._steps_here(), {peer: tier._steps_here() for peer, tier in others.items()}
    here._held = dict(enumerate([own, *held.values()]))
    here.files.know(own, held)
    steps = [step for some in here._held.values() for step in some]
    return {name: any(step.is_intact and step.name == name for step in steps) for name in {step.name for step in steps}}


@functools.cache
def values(step: int) -> dict[str, np.ndarray]:
    """The arrays of a step."""
    return {name: fast.values_of(name, step) for name in fast.SHAPES}


def targets() -> dict[str, np.ndarray]:
    """Arrays of the same shapes, with other values."""
    return {name: np.full_like(value, 101) for name, value in values(0).items()}


@contextlib.contextmanager
def saved_runs(folder: Path) -> Iterator[list[Run]]:
    """Save a run for each redundancy, and serve its hosts."""
    with running(HOSTS, 1) as job:
        for redundancy in REDUNDANCIES:
            place = folder / redundancy
            job.call(fast.save_steps, str(place / "slow"), str(place / "fast"), STEPS, None, {"redundancy": redundancy})
    with contextlib.ExitStack() as opened:
        yield [_served(folder / redundancy, redundancy, opened) for redundancy in REDUNDANCIES]


def _served(place: Path, redundancy: str, opened: contextlib.ExitStack) -> Run:
    hosts = list[Host]()
    for number in range(HOSTS):
        tier = FastTier(jct.FastTierSettings(directory=str(place / "fast" / f"host{number}")), str(place / "slow"))
        server = FileServer(tier.directory, TOKEN, "127.0.0.1")
        peer = Peer(number, server.address, TOKEN, 5.0)
        opened.callback(server.close)
        opened.callback(peer.close)
        hosts.append(Host(tier, peer))
    layout = hosts[0].tier.files.layout(hosts[0].newest.name)
    assert layout is not None
    shutil.copytree(place / "slow", place / "pristine", symlinks=True)
    return Run(redundancy, place, tuple(hosts), layout)


@contextlib.contextmanager
def flipped(file: Path, at: int, mask: int) -> Iterator[None]:
    """Change a byte of a file meanwhile."""
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
    try:
        yield
    finally:
        file.write_bytes(whole)


class Flips:
    """Trials, and what they found: `counts` by redundancy, kind of the file, and outcome."""

    def __init__(self, seed: int, restores: int, settings: jct.StoreSettings | None = None) -> None:
        self.seed, self.restores, self.settings = seed, restores, settings or jct.StoreSettings()
        self.counts, self.problems = Counter[tuple[str, str, str]](), list[str]()

    def run(self, number: int, run: Run) -> None:
        """Flip a byte, and restore."""
        chosen = random.Random(f"{self.seed} {number}")
        host, *others = chosen.sample(range(HOSTS), HOSTS)
        lost = others[0] if chosen.random() < 0.5 else None
        left = [each for each in range(HOSTS) if each != lost]
        reader = chosen.choice([*left, None])
        served = [run.hosts[each] for each in left if each != reader]
        folder = run.hosts[host].newest
        file = chosen.choice([each for each in sorted(folder.rglob("*")) if each.is_file() and each.stat().st_size])
        path, at, mask = str(file.relative_to(folder)), chosen.randrange(file.stat().st_size), chosen.randrange(1, 256)
        kind = run.kind_of(host, path)
        subject = (
            f"trial {number}, {run.redundancy}: byte {at} ^ {mask} of {path} ({kind}) of host {host}, lost {lost}, "
            f"read by {reader}"
        )
        try:
            with flipped(file, at, mask):
                steps = run.restored("new" if reader is None else f"host{reader}", served, self.restores, self.settings)
        except jct.CheckpointError as error:
            self._problem(f"{subject}: {type(error).__name__}: {error}")
            steps = []
        finally:
            shutil.rmtree(run.slow)
            shutil.copytree(run.folder / "pristine", run.slow, symlinks=True)
            shutil.rmtree(run.folder / "fast" / "new", ignore_errors=True)
        may_be_older = lost is not None and run.redundancy != "p+q" and kind not in METADATA.values()
        if not set(steps) <= ({OLDER, NEWEST} if may_be_older else {NEWEST}):
            self._problem(f"{subject}: restored {steps}")
        is_newest = bool(steps) and min(steps) == NEWEST
        self.counts[run.redundancy, kind, "newest" if is_newest else "older" if OLDER in steps else "wrong"] += 1

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, flush=True)

    def outcomes(self) -> Counter[str]:
        """The number of trials with each outcome."""
        return sum((Counter({key[-1]: count}) for key, count in self.counts.items()), Counter[str]())


def campaign(
    runs: list[Run], trials: int, seed: int, restores: int = 3, settings: jct.StoreSettings | None = None
) -> Flips:
    """Run trials on each run in turn."""
    found, log = Flips(seed, restores, settings), logging.getLogger("jaxckpt_train")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        for number in range(trials):
            found.run(number, runs[number % len(runs)])
            if number % 1000 == 999:
                print(f"{number + 1} trials: {dict(found.outcomes())}", flush=True)
    finally:
        log.setLevel(level)
    return found


def main() -> None:
    """Print what was found; exit with 1 if there are problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--restores", type=int, default=3, help="how often a manager restores in each trial")
    parser.add_argument("--control", action="store_true", help="compare no digests, which must be found")
    options = parser.parse_args()
    settings = jct.StoreSettings(verify_on_load=not options.control)
    with tempfile.TemporaryDirectory(prefix="flips-") as folder, saved_runs(Path(folder)) as runs:
        found = campaign(runs, options.trials, options.seed, options.restores, settings)
    for (redundancy, kind, outcome), count in sorted(found.counts.items()):
        print(f"{redundancy:8} {kind:9} {outcome:7} {count:6}")
    print(f"{options.trials} trials, seed {options.seed}: {dict(found.outcomes())}, {len(found.problems)} problems")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
