"""Makes all that a device may hold after a power cut, mounts it, and looks.

`python -m tests.nightly.faults.block_replay`

A run, or a single checkpoint, is saved again and again on a real ext4 or xfs whose device is recorded. Of a state all
is there that was written before the last flush, and of what came since some blocks of 4 KiB. The file system mends
itself when it is mounted; then all that had been acknowledged until that moment must be there. Some recordings go on
from such a state of another one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES
from tests.nightly.crash.facts import Facts, state_of
from tests.nightly.crash.oracles import problems_in_run, problems_of_single
from tests.nightly.crash.programs import process
from tests.nightly.faults import fuse_disk, loop_disk
from tests.nightly.faults.block_recorder import Change, attach, detach, recorded_disk
from tests.nightly.faults.campaign_end import leave_with, those_that_can
from tests.nightly.faults.loop_disk import UNMOUNT_S

BLOCK = 4096
BLKFLSBUF = 0x1261  # from <linux/fs.h>: forget what is cached of a block device
Blocks = dict[int, bytes]  # the content of a device by the number of the block; the others are zero
KINDS = ("ext4", "xfs")
STATES_OF_ONE = 250
GOES_ON = 0.5
SAVES, BUSY_S = 12, 0.01
RUN, SINGLE = "data/run", "data/one"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Found:
    """What a campaign came to: states looked at, how many had any save, and what must not be."""

    states: int = 0
    with_saves: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A program's life on a recorded device: what was on it before, what changed it, and what was promised when.

    Attributes:
        boot: how often the machine had been started before.
    """

    start: Blocks
    changes: Sequence[Change]
    facts: Facts
    program: str
    boot: int = 0


def why_not(kind: str) -> str | None:
    """Why this cannot be done here; None: it can."""
    return loop_disk.why_not(kind) or fuse_disk.why_not()


def record(
    folder: Path, kind: str, program: str, chance: random.Random, settings: StoreSettings, before: Recording | None
) -> Recording:
    """Save some times on a new file system, or on what a power cut left `before`."""
    image = None if before is None else _image(folder / "before.start", kind, before.start)
    with recorded_disk(folder, kind, image) as disk:
        facts = Facts(keep=chance.choice((None, 1, 2))) if before is None else before.facts
        save = _save_steps if program == "run" else _save_single
        (disk.path / "data").mkdir(exist_ok=True)
        boot = 0 if before is None else before.boot
        with process(1, boot):
            for promise in save(disk.path, facts, chance, settings):
                promise(disk.written())
        gc.collect()
        start = _blocks_of(disk.start)
    return Recording(start, list(disk.changes()), facts, program, boot)


def _save_steps(root: Path, facts: Facts, chance: random.Random, settings: StoreSettings) -> Iterator[Any]:
    """Saves, replacements, and pins; hands out what is to be told of each, for the moment at which it is handed out."""
    policy = None if facts.keep is None else LatestN(facts.keep)
    with StepManager(root / RUN, preservation_policy=policy, settings=settings) as manager:
        for _ in range(SAVES):
            latest = manager.latest or 0
            replaces = latest > 0 and chance.random() < 0.25
            step = latest if replaces else latest + 1
            made: list[Any] = []
            yield lambda at, step=step, made=made: made.append(facts.begin(step, at))
            manager.save(step, state_of(made[0].token), overwrite=replaces)
            manager.wait()
            yield lambda at, made=made: facts.acknowledge(made[0], at)
            if chance.random() < 0.1:
                manager.pin(step)
                yield lambda at, step=step: facts.pins.setdefault(step, at)


def _save_single(root: Path, facts: Facts, chance: random.Random, settings: StoreSettings) -> Iterator[Any]:
    """The same for one name that is overwritten."""
    for _ in range(SAVES):
        made: list[Any] = []
        yield lambda at, made=made: made.append(facts.begin(0, at))
        checkpoint.save_checkpointables(root / SINGLE, state_of(made[0].token), overwrite=True, settings=settings)
        yield lambda at, made=made: facts.acknowledge(made[0], at)


class Replayed:
    """A device that is made to hold one state after the other, and where it is mounted."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._kind, self.path, self._image = kind, folder / "replayed", folder / "replayed.img"
        self.path.mkdir()
        size = loop_disk.SIZES_MIB[kind] << 20
        self._file = os.open(self._image, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, size)
        self._device = attach(self._image)

    def hold(self, blocks: Blocks) -> None:
        """Make it hold just these blocks, also for a kernel that still knows others, as while somebody has it open."""
        device = os.open(self._device, os.O_RDONLY)
        try:
            fcntl.ioctl(device, BLKFLSBUF)
        finally:
            os.close(device)
        _fill(self._file, os.fstat(self._file).st_size, blocks)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """The file system mends itself first."""
        path = os.fsencode(self.path)
        if _libc.mount(self._device.encode(), path, self._kind.encode(), 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"the {self._kind} cannot be mounted")
        try:
            yield
        finally:
            gc.collect()
            until = time.monotonic() + UNMOUNT_S
            while _libc.umount2(path, 0) != 0:
                if time.monotonic() > until:  # no finding, and nothing can be looked at after it
                    raise RuntimeError(f"{self.path} cannot be unmounted: {os.strerror(ctypes.get_errno())}")
                time.sleep(BUSY_S)

    def close(self) -> None:
        """Free the device."""
        os.close(self._file)
        detach(self._device)


@contextlib.contextmanager
def replayed(folder: Path, kind: str) -> Iterator[Replayed]:
    """Such a device, until the end."""
    made = Replayed(folder, kind)
    try:
        yield made
    finally:
        made.close()


def states(recording: Recording, count: int, chance: random.Random) -> Iterator[tuple[int, Blocks]]:
    """So many crash states, from the first moment to the last: the moment, and what the device holds."""
    blocks, pending = dict(recording.start), list[Change]()
    chosen = sorted(chance.choices(range(len(recording.changes)), k=count))
    for index, change in enumerate(recording.changes):
        if change.data is not None:
            pending.append(change)
        else:
            for each in pending:
                _write(blocks, each, lambda: True)
            pending.clear()
        while chosen and chosen[0] == index:
            chosen.pop(0)
            state, share = blocks.copy(), chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
            for each in pending:
                _write(state, each, lambda share=share: chance.random() < share)
            yield change.end, state


def _write(blocks: Blocks, change: Change, is_there: Callable[[], bool]) -> None:
    """Those of its blocks that are there."""
    assert change.data is not None
    at = 0
    while at < len(change.data):
        number, within = divmod(change.offset + at, BLOCK)
        piece = change.data[at : at + BLOCK - within]
        if is_there():
            old = blocks.get(number, bytes(BLOCK))
            blocks[number] = old[:within] + piece + old[within + len(piece) :]
        at += len(piece)


def _image(path: Path, kind: str, blocks: Blocks) -> Path:
    """A new file that holds just these blocks."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _fill(file, loop_disk.SIZES_MIB[kind] << 20, blocks)
    finally:
        os.close(file)
    return path


def _fill(file: int, size: int, blocks: Blocks) -> None:
    os.ftruncate(file, 0)
    os.ftruncate(file, size)
    for number, block in blocks.items():
        os.pwrite(file, block, number * BLOCK)


def _blocks_of(path: Path) -> Blocks:
    """Those that are not all zero."""
    content = np.fromfile(path, np.uint8).reshape(-1, BLOCK)
    return {int(number): content[number].tobytes() for number in np.flatnonzero(content.any(axis=1))}


def campaign(
    folder: Path,
    kind: str,
    count: int,
    seed: int,
    settings: StoreSettings | None = None,
    programs: Sequence[str] = ("run", "run", "run", "single"),
) -> Found:
    """So many states of one kind of file system, of several recordings."""
    found, chance = Found(), random.Random(seed)
    before: Recording | None = None
    with replayed(folder, kind) as disk:
        for number in range(-(-count // STATES_OF_ONE)):
            place = folder / f"recording-{number}"
            place.mkdir()
            if chance.random() >= GOES_ON:
                before = None
            program = chance.choice(programs) if before is None else before.program
            recording = record(place, kind, program, chance, settings or StoreSettings(), before)
            for each in place.rglob("*.start"):
                each.unlink()
            subject = f"{kind}, seed {seed}, recording {number} ({program})"
            before = _look_at(found, disk, recording, min(STATES_OF_ONE, count - found.states), chance, subject)
    return found


def _look_at(
    found: Found, disk: Replayed, recording: Recording, count: int, chance: random.Random, subject: str
) -> Recording:
    """Look at so many states of it; returns one of them, for another recording to go on from."""
    one = chance.randrange(count)
    for number, (moment, blocks) in enumerate(states(recording, count, chance)):
        disk.hold(blocks)
        found.states += 1
        facts = recording.facts.until(moment)
        if number == one:
            left = Recording(blocks, [], recording.facts.until(moment), recording.program, recording.boot + 1)
        try:
            with disk.mounted(), process(found.states + 1, recording.boot + 1):
                found.with_saves += bool(facts.acknowledged())
                problems = _problems(disk.path, recording.program, facts)
        except (CheckpointError, OSError, AssertionError) as error:
            problems = [f"{type(error).__name__}: {error}"]
        found.problems += [f"{subject}, state {found.states} at byte {moment}: {each}" for each in problems]
    return left


def _problems(root: Path, program: str, facts: Facts) -> list[str]:
    (root / "data").mkdir(exist_ok=True)  # the cut may have come before it was there
    if program == "single":
        path = root / SINGLE
        return problems_of_single(str(path), StoreSettings(), facts, lambda: os.listdir(path.parent))
    policy = None if facts.keep is None else LatestN(facts.keep)
    with StepManager(root / RUN, preservation_policy=policy) as manager:
        return problems_in_run(manager, facts, lambda: _names(root / RUN), lambda: StepManager(root / RUN))


def _names(folder: Path) -> list[str]:
    """What is half made for the lock is left alone for a while, as somebody may be at work on it."""
    return [name for name in os.listdir(folder) if not name.startswith(TEMPORARY_PREFIXES)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="over all kinds of file systems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    chosen = parser.parse_args()
    logging.getLogger("jaxckpt_train").disabled = True
    problems, started = [], time.monotonic()
    for kind in those_that_can(chosen.kinds, why_not):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            found = campaign(Path(folder), kind, -(-chosen.states // len(chosen.kinds)), chosen.seed)
        print(f"{kind}: {found.states} states, {found.with_saves} of them after an acknowledgement", flush=True)
        problems += [f"{kind}: {problem}" for problem in found.problems]
    leave_with(problems, started, chosen.seed)


def _memory() -> str | None:
    """Where files are in memory, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
