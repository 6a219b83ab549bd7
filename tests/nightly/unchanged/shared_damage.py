"""Damage files that several steps share: `python -m tests.nightly.unchanged.shared_damage`.

A run in which some arrays change and others do not is on a real file system, with its hard links, or copied without
them. One file is changed in place, replaced or removed; then each step is verified and loaded, and the run is verified,
restored and continued. Damage is found in each step that has the file, and in no other; a restore goes back past all of
them; what is loaded is what was saved. In some trials the run notices nothing, and goes on saving.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store import reuse
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.verify import IntactFiles, first_damage, verify
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults.campaign_end import leave_with

NAMES, ELEMENTS, MOST_STEPS = 4, 1500, 6
OF_ONE_RUN = 20  # trials with the same run
LIVE = 10  # in one of this many trials the run goes on without a restart
with small_sizes():  # each array gets a file of its own
    SETTINGS = jct.StoreSettings(durability="none", io_threads=1, staging_bytes=1 << 16, segment_bytes=8192)
Values = dict[str, bytes]


def flip(file: Path, chance: random.Random) -> None:
    """Flip one bit."""
    with open(file, "r+b") as opened:
        at = chance.randrange(file.stat().st_size)
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << chance.randrange(8)]))


def zero(file: Path, chance: random.Random) -> None:
    """Set up to a page to zeros."""
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        at = chance.randrange(size)
        opened.seek(at)
        opened.write(bytes(min(chance.randint(1, 4096), size - at)))


def truncate(file: Path, chance: random.Random) -> None:
    """Cut off the end."""
    os.truncate(file, chance.randrange(file.stat().st_size))


def extend(file: Path, chance: random.Random) -> None:
    """Append bytes."""
    with open(file, "ab") as opened:
        opened.write(chance.randbytes(chance.randint(1, 5000)))


def replace(file: Path, chance: random.Random) -> None:
    """Put another file in its place, which leaves the file's other names alone."""
    other = file.with_name("other")
    shutil.copyfile(file, other)
    chance.choice((flip, truncate, extend))(other, chance)
    other.rename(file)


def remove(file: Path, chance: random.Random) -> None:
    """Remove this name of it."""
    file.unlink()


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    each.__name__: each for each in (flip, zero, truncate, extend, replace, remove)
}


@dataclasses.dataclass
class Found:
    """The result: the problems, and counts of trials, of damaged steps, and of where restores ended."""

    problems: list[str] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)


class Run:
    """A run with steps that share files, and what each step must have."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.random = np.random.default_rng(chance.randrange(1 << 32))
        self.state = {f"a{number}": self.random.standard_normal(ELEMENTS) for number in range(NAMES)}
        self.frozen = [name for name in self.state if chance.random() < 0.5] or None
        self.expected: dict[int, Values] = {}

    def opened(self) -> jct.StepManager:
        return jct.StepManager(self.folder, frozen=self.frozen, settings=SETTINGS)

    def save(self, manager: jct.StepManager, steps: int) -> None:
        """Save some steps; before each, a few arrays change."""
        for _ in range(steps):
            for name in self.state:
                if self.chance.random() < 0.25:
                    self.state[name] = self.random.standard_normal(ELEMENTS)
            step = max(self.expected, default=0) + 1
            manager.save(step, {"state": dict(self.state)})
            manager.wait()
            self.expected[step] = bytes_of(self.state)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"


def bytes_of(state: dict[str, Any]) -> Values:
    """The bytes of each array."""
    return {name: np.asarray(array).tobytes() for name, array in state.items()}


@dataclasses.dataclass
class Files:
    """The files of a run: by path, the number of its content; names with the same number are one file."""

    names: dict[Path, int] = dataclasses.field(default_factory=dict)
    contents: list[bytes] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Files:
        """Read a folder."""
        found, inodes = cls(), dict[int, int]()
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            inode = path.stat().st_ino
            if inode not in inodes:
                inodes[inode] = len(found.contents)
                found.contents.append(path.read_bytes())
            found.names[path.relative_to(folder)] = inodes[inode]
        return found

    def write(self, folder: Path, *, linked: bool) -> None:
        """Write them below an empty folder, with their links or without."""
        first = dict[int, Path]()
        for name, number in self.names.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if linked and number in first:
                os.link(first[number], path)
            else:
                path.write_bytes(self.contents[number])
                first[number] = path


class Trial:
    """One damaged run: which of its steps are damaged, and what is found."""

    def __init__(self, found: Found, subject: str, run: Run, settings: jct.StoreSettings) -> None:
        self.found, self.subject, self.run, self.settings = found, subject, run, settings

    def wrong(self, what: str) -> None:
        self.found.problems.append(f"{self.subject}: {what}")

    def hit(self, before: Files) -> set[int]:
        """The steps that have a file with other content than before, or lack one; later steps by the inode."""
        hit, inodes = set[int](), set[int]()
        for name, number in before.names.items():
            path = self.run.folder / name
            is_there = path.exists()
            if name.parts[0].startswith("step-") and not (is_there and path.read_bytes() == before.contents[number]):
                hit.add(int(name.parts[0][-10:]))
                inodes.update([path.stat().st_ino] if is_there else [])
        for step in self.run.expected:
            if any(path.stat().st_ino in inodes for path in self.run.place(step).rglob("*.safetensors")):
                hit.add(step)
        return hit

    def check(self, hit: set[int]) -> None:
        """Verify and load each step, and verify the run; then restore it."""
        loaded = {step for step in self.run.expected if self.loads(step, step in hit)}
        intact = IntactFiles()
        for step in sorted(self.run.expected, reverse=True):
            path, state = str(self.run.place(step)), "a damaged" if step in hit else "an intact"
            if verify(LocalBackend(), path, SETTINGS).ok == (step in hit):
                self.wrong(f"verify is wrong about {state} step {step}")
            if (first_damage(LocalBackend(), path, None, intact) is None) == (step in hit):
                self.wrong(f"a verification of the run is wrong about {state} step {step}")
        self.restore(loaded, hit)
        self.found.counts["damaged steps"] += len(hit)

    def loads(self, step: int, is_hit: bool) -> bool:
        """Load a step; returns whether it can be."""
        try:
            found = bytes_of(jct.load(self.run.place(step), settings=self.settings))
        except CheckpointError as error:
            if not is_hit:
                self.wrong(f"a false alarm for step {step}: {error}")
            return False
        if found != self.run.expected[step]:
            self.wrong(f"step {step} is loaded, and wrong")
        return True

    def restore(self, loaded: set[int], hit: set[int]) -> None:
        """Restore the newest step that can be loaded, and continue from it."""
        newest = max(loaded, default=None)
        with jct.StepManager(self.run.folder, frozen=self.run.frozen, settings=self.settings) as manager:
            manager.own()
            try:
                state = dict(manager.restore()["state"])
            except CheckpointError as error:
                if newest is not None:
                    self.wrong(f"the restore raised {type(error).__name__}, but step {newest} can be loaded")
                self.found.counts["no step left"] += 1
                return
            self.found.counts["restored an older step"] += newest != max(self.run.expected)
            if newest is None or bytes_of(state) != self.run.expected[newest]:
                self.wrong(f"the restore did not give step {newest}")
                return
            aside = [step for step in sorted(self.run.expected) if step > newest]
            if manager.damaged != aside:
                self.wrong(f"set aside are {manager.damaged}, expected {aside}")
            if self.run.chance.random() < 0.3:
                self.continue_with(manager, state, newest in hit)

    def continue_with(self, manager: jct.StepManager, state: dict[str, Any], is_hit: bool) -> None:
        """Save two more steps, which have no damage, unless a load cannot see it."""
        last = max(self.run.expected)
        self.run.state = state
        self.run.save(manager, 2)
        for step in (last + 1, last + 2):
            if not self.loads(step, is_hit=False):
                self.wrong(f"step {step}, saved after a restore, cannot be loaded")
            if not (verify(LocalBackend(), str(self.run.place(step)), SETTINGS).ok or is_hit):
                self.wrong(f"step {step}, saved after a restore, is damaged")
        self.found.counts["continued"] += 1


def campaign(trials: int, seed: int, folder: Path | None = None, settings: jct.StoreSettings = SETTINGS) -> Found:
    """Damage one file in each trial. `settings` are those of loads."""
    found = Found()
    with small_sizes(), pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=folder) as name:
        patch.setattr(reuse, "MIN_APART_BYTES", 1)
        for number in range(0, trials, OF_ONE_RUN):
            made = Run(Path(name, "made"), random.Random(f"{seed} {number}"))
            with made.opened() as manager:
                made.save(manager, made.chance.randint(3, MOST_STEPS))
            files = Files.of(made.folder)
            for trial in range(number, min(number + OF_ONE_RUN, trials)):
                one(found, made, files, random.Random(f"{seed} {number} {trial}"), trial, settings)
            shutil.rmtree(made.folder)
    return found


def one(found: Found, made: Run, files: Files, chance: random.Random, trial: int, settings: jct.StoreSettings) -> None:
    """One trial with a copy of a run, or with one that goes on saving."""
    run = Run(made.folder.with_name("run"), chance)
    kind, is_live = chance.choice(list(KINDS)), trial % LIVE == 0
    is_linked = is_live or chance.random() < 0.7
    if is_live:
        with run.opened() as manager:
            run.save(manager, chance.randint(2, MOST_STEPS - 2))
            files = Files.of(run.folder)
            victim = damage(run.folder, files, kind, chance)
            run.save(manager, 2)
    else:
        run.expected, run.frozen = dict(made.expected), made.frozen
        files.write(run.folder, linked=is_linked)
        victim = damage(run.folder, files, kind, chance)
    subject = f"trial {trial}, {kind} {victim}{', live' if is_live else '' if is_linked else ', without links'}"
    one = Trial(found, subject, run, settings)
    hit = one.hit(files)
    if not is_live and hit and hit != (expected := steps_with(files, victim, is_linked and kind in IN_PLACE)):
        one.wrong(f"damaged are {sorted(hit)}, expected {sorted(expected)}")
    one.check(hit)
    found.counts[f"{kind}{'' if is_linked else ', without links'}"] += 1
    shutil.rmtree(run.folder)


IN_PLACE = ("flip", "zero", "truncate", "extend")


def damage(folder: Path, files: Files, kind: str, chance: random.Random) -> Path:
    """Damage a data file, mostly one that several steps share, and of the newest step; returns its name."""
    names = [name for name in files.names if name.suffix == ".safetensors"]
    counts, newest = Counter(files.names.values()), max(name.parts[0] for name in names)
    shared = [name for name in names if counts[files.names[name]] > 1]
    newer = [name for name in shared if name.parts[0] == newest]
    victim = chance.choice(chance.choices((newer or names, shared or names, names), (6, 3, 1))[0])
    KINDS[kind](folder / victim, chance)
    return victim


def steps_with(files: Files, victim: Path, is_shared: bool) -> set[int]:
    """The steps with this file; alone that of this name, unless damage of it is shared."""
    names = [name for name, number in files.names.items() if number == files.names[victim]] if is_shared else [victim]
    return {int(name.parts[0][-10:]) for name in names}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are; faster in memory")
    chosen, started = parser.parse_args(), time.monotonic()
    found = campaign(chosen.trials, chosen.seed, chosen.folder)
    for what, count in sorted(found.counts.items()):
        print(f"  {what}: {count:,}")
    print(f"{chosen.trials} trials;", end=" ")
    leave_with(found.problems, started, chosen.seed)


if __name__ == "__main__":
    main()
