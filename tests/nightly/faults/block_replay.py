"""Create possible states of a device after a power failure, mount them, and check the promises.

`python -m tests.nightly.faults.block_replay`

A run, or a single checkpoint, is saved repeatedly on a real ext4 or xfs whose device is recorded. A state holds all
writes before the last flush, and some blocks of 4 KiB of later writes. The file system recovers when it is mounted;
then everything acknowledged until that moment must be there. Some recordings start from such a state of another one.
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
import shutil
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
from tests.nightly.faults.block_recorder import LIST, Change, attach, detach, recorded_disk
from tests.nightly.faults.campaign_end import leave_with, those_that_can
from tests.nightly.faults.loop_disk import UNMOUNT_S

BLOCK = 4096
BLKFLSBUF = 0x1261  # from <linux/fs.h>: drop the cache of a block device
Blocks = dict[int, bytes]  # the content of a device by the number of the block; the others are zero
KINDS = ("ext4", "xfs")
STATES_OF_ONE = 250
CONTINUE_SHARE = 0.5
SAVES, BUSY_S = 12, 0.01
RUN, SINGLE = "data/run", "data/one"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Found:
    """The result of a campaign: states checked, states with a save, and problems."""

    states: int = 0
    with_saves: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A program on a recorded device: the initial content, the changes, and the promises.

    Attributes:
        boot: the number of earlier boots of the machine.
    """

    start: Blocks
    changes: Sequence[Change]
    facts: Facts
    program: str
    boot: int = 0


def why_not(kind: str) -> str | None:
    """Return why this machine cannot run the campaign, or None."""
    return loop_disk.why_not(kind) or fuse_disk.why_not()


def record(
    folder: Path, kind: str, program: str, chance: random.Random, settings: StoreSettings, before: Recording | None
) -> Recording:
    """Save several times on a new file system, or on a state of an earlier recording."""
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
    """Save, replace and pin steps; yield functions that record each promise at a moment."""
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
    """Save one checkpoint that is overwritten; yield functions that record each promise."""
    for _ in range(SAVES):
        made: list[Any] = []
        yield lambda at, made=made: made.append(facts.begin(0, at))
        checkpoint.save_checkpointables(root / SINGLE, state_of(made[0].token), overwrite=True, settings=settings)
        yield lambda at, made=made: facts.acknowledge(made[0], at)


class Replayed:
    """A device that holds a sequence of states, and its mount point."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._kind, self.path, self._image = kind, folder / "replayed", folder / "replayed.img"
        self.path.mkdir()
        size = loop_disk.SIZES_MIB[kind] << 20
        self._file = os.open(self._image, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, size)
        self._device = attach(self._image)

    def hold(self, blocks: Blocks) -> None:
        """Write these blocks, and drop blocks that the kernel has cached while another process has the device open."""
        device = os.open(self._device, os.O_RDONLY)
        try:
            fcntl.ioctl(device, BLKFLSBUF)
        finally:
            os.close(device)
        _fill(self._file, os.fstat(self._file).st_size, blocks)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount the file system, which first recovers."""
        path = os.fsencode(self.path)
        if _libc.mount(self._device.encode(), path, self._kind.encode(), 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"the {self._kind} cannot be mounted")
        try:
            yield
        finally:
            gc.collect()
            until = time.monotonic() + UNMOUNT_S
            while _libc.umount2(path, 0) != 0:
                if time.monotonic() > until:  # not a finding, and no further state can be checked
                    raise RuntimeError(f"{self.path} cannot be unmounted: {os.strerror(ctypes.get_errno())}")
                time.sleep(BUSY_S)

    def close(self) -> None:
        """Detach the device."""
        os.close(self._file)
        detach(self._device)


@contextlib.contextmanager
def replayed(folder: Path, kind: str) -> Iterator[Replayed]:
    """Yield a device for replays, and close it at the end."""
    made = Replayed(folder, kind)
    try:
        yield made
    finally:
        made.close()


def states(recording: Recording, count: int, chance: random.Random) -> Iterator[tuple[int, Blocks]]:
    """Yield `count` crash states in order of their moments: the moment, and the blocks of the device."""
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
    """Apply the blocks of a write that reached the device."""
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
    """Create a file that holds just these blocks."""
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
    """Return the blocks that are not all zero."""
    content = np.fromfile(path, np.uint8).reshape(-1, BLOCK)
    return {int(number): content[number].tobytes() for number in np.flatnonzero(content.any(axis=1))}


def campaign(
    folder: Path,
    kind: str,
    count: int,
    seed: int,
    settings: StoreSettings | None = None,
    programs: Sequence[str] = ("run", "run", "run", "single"),
    keep: Path | None = None,
) -> Found:
    """Check `count` states of one kind of file system; `keep`: a folder for recordings with problems."""
    found, chance = Found(), random.Random(seed)
    before: Recording | None = None
    with replayed(folder, kind) as disk:
        for number in range(-(-count // STATES_OF_ONE)):
            place = folder / f"recording-{number}"
            place.mkdir()
            if chance.random() >= CONTINUE_SHARE:
                before = None
            program = chance.choice(programs) if before is None else before.program
            recording = record(place, kind, program, chance, settings or StoreSettings(), before)
            for each in place.rglob("*.start"):
                each.unlink()
            subject, known = f"{kind}, seed {seed}, recording {number} ({program})", len(found.problems)
            before = _check_states(found, disk, recording, min(STATES_OF_ONE, count - found.states), chance, subject)
            if keep is not None and len(found.problems) > known:
                _keep(keep / f"{kind}-{seed}-{number}", kind, recording, next(place.rglob(LIST)))
    return found


def _keep(path: Path, kind: str, recording: Recording, changes: Path) -> None:
    """Write a recording: the initial image, the changes as the recorder listed them, and the promises as text."""
    path.mkdir(parents=True)
    _image(path / "start", kind, recording.start)
    shutil.copy(changes, path / LIST)
    (path / "facts").write_text(repr(recording.facts), encoding="utf-8")


def _check_states(
    found: Found, disk: Replayed, recording: Recording, count: int, chance: random.Random, subject: str
) -> Recording:
    """Check `count` states of a recording; return one of them as the start of another recording."""
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
    (root / "data").mkdir(exist_ok=True)  # the power may have failed before it existed
    if program == "single":
        path = root / SINGLE
        return problems_of_single(str(path), StoreSettings(), facts, lambda: os.listdir(path.parent))
    policy = None if facts.keep is None else LatestN(facts.keep)
    with StepManager(root / RUN, preservation_policy=policy) as manager:
        return problems_in_run(manager, facts, lambda: _names(root / RUN), lambda: StepManager(root / RUN))


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, except temporary files of locks, which another process may still use."""
    return [name for name in os.listdir(folder) if not name.startswith(TEMPORARY_PREFIXES)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="over all kinds of file systems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--keep", type=Path, help="write the recordings with problems to this folder")
    chosen = parser.parse_args()
    logging.getLogger("jaxckpt_train").disabled = True
    problems, started = [], time.monotonic()
    for kind in those_that_can(chosen.kinds, why_not):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            count = -(-chosen.states // len(chosen.kinds))
            found = campaign(Path(folder), kind, count, chosen.seed, keep=chosen.keep)
        print(f"{kind}: {found.states} states, {found.with_saves} of them after an acknowledgement", flush=True)
        problems += [f"{kind}: {problem}" for problem in found.problems]
    leave_with(problems, started, chosen.seed)


def _memory() -> str | None:
    """Return a folder in memory, or None."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
