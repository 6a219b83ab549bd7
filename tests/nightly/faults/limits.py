"""Run into limits of the machine: a full or read-only disk, and limits of the process.

`python -m tests.nightly.faults.limits`. A run saves one step, the second under the limit, and the third without it. The
second is acknowledged, or raises a `CheckpointError` that names its subject, what was refused and what to do. In any
case the other steps are intact, and nothing is left over, even while the process lives. Each run is a forked process,
and so is the check of its result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import re
import resource
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxckpt_train.checkpointables.handlers import handler_of
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from tests.nightly.faults.campaign_end import leave_with, those_that_can
from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.known_states import KEPT, SETTINGS, checkpointables_of, token_in
from tests.nightly.faults.native_programs import by_kind, checked, inspect_run
from tests.nightly.faults.needs import why_no_mount
from tests.support.forking import LONGEST_S, Tell, forked

KIB, MIB = 1 << 10, 1 << 20
ROOMY = 64 * MIB
Limited = contextlib.AbstractContextManager[None]


@dataclasses.dataclass
class Found:
    """The result of a campaign: runs by limit, runs whose save under the limit failed, and problems."""

    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Clear:
    """Patterns of an error: what was refused, what to do, and its subject if that is not the path of the run."""

    refused: str
    advice: str
    subject: str = r"(?!)"


MOST_STACKS = 200
UNCLEAR = "the error does not say"
CLEAR = {
    "file size": Clear("File too large", r"ulimit -f"),
    "descriptors": Clear("Too many open files", r"ulimit -n"),
    "memory": Clear(
        r"the system refused [0-9]+ bytes of memory",
        r"raise the limits|choose a smaller value",
        r"StoreSettings\.staging_bytes",
    ),
    "full disk": Clear("No space left on device", r"free some space or choose another directory"),
    "read-only": Clear("Read-only file system", r"choose another directory"),
}


def lacks(name: str, directory: Path, message: str) -> list[str]:
    """Return what the error of a save under this limit does not say."""
    wanted = CLEAR[name]
    patterns = {
        "of what it is": rf"{re.escape(str(directory))}\b|{wanted.subject}",
        "what was refused": wanted.refused,
        "what to do": wanted.advice,
    }
    return [what for what, pattern in patterns.items() if not re.search(pattern, message)]


def run(directory: Path, limit: Callable[[], Limited], at: int, tell: Tell) -> None:
    """Save three steps, number `at` of them under the limit."""
    with StepManager(directory, preservation_policy=LatestN(KEPT), settings=SETTINGS) as manager:
        for step in (1, 2, 3):
            around = limit if step == at else contextlib.nullcontext
            try:
                with around():
                    manager.save(step, checkpointables_of(step))
                    manager.wait(LONGEST_S)
            except (CheckpointError, MemoryError) as error:
                tell("failed", [step, "; ".join([str(error), *getattr(error, "__notes__", ())])])
            else:
                tell("acknowledged", step)
        tell("restored", token_in(manager.restore()))
        manager._run._deleter.wait(LONGEST_S)  # retention may be deleting step 1
        tell("left", [name for name in os.listdir(directory) if ".tmp-" in name])


def trial(found: Found, name: str, value: object, directory: Path, limit: Callable[[], Limited], at: int = 2) -> None:
    """Run one trial, and check its result."""
    lines, status = forked(lambda tell: run(directory, limit, at, tell))
    events = by_kind(lines)
    problems = [] if status == 0 else [f"the run ended with {status}: {' '.join(events['raised'])}"]
    failed = [step for step, _ in events["failed"]]
    found.runs[name] += 1
    found.failed[name] += failed == [at]
    if set(failed) - {at}:
        problems.append(f"the limit was over, and yet: {events['failed']}")
    problems += [f"{UNCLEAR} {lack}: {text}" for _, text in events["failed"] for lack in lacks(name, directory, text)]
    known = " ".join(text for _, text in events["failed"] if "could not be removed" in text)
    problems += [f"left over in a life: {left}" for names in events["left"] for left in names if left not in known]
    if events["restored"] != [3]:
        problems.append(f"restored {events['restored']}")
    problems += checked(inspect_run, directory, events)
    found.problems += [f"{name} {value}: {problem}" for problem in problems]


@contextlib.contextmanager
def process_limit(kind: int, value: int) -> Iterator[None]:
    """Set a soft limit of this process."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def file_sizes(found: Found, folder: Path) -> None:
    """Limit the size of files."""
    for number, value in enumerate((0, 1, 100, 4095, 4096, 5000, 200_000, 320_000, 330_000, 400_000)):
        limit = lambda value=value: process_limit(resource.RLIMIT_FSIZE, value)  # noqa: E731
        trial(found, "file size", value, folder / f"size{number}", limit)


def descriptors(found: Found, folder: Path) -> None:
    """Limit the number of further open files."""
    for more in range(14):
        trial(found, "descriptors", more, folder / f"descriptors{more}", lambda more=more: limited_descriptors(more))  # type: ignore[misc]


@contextlib.contextmanager
def limited_descriptors(more: int) -> Iterator[None]:
    """Leave room for `more` open files, whichever descriptors are free."""
    used, limit = [], 256
    with process_limit(resource.RLIMIT_NOFILE, limit):
        with contextlib.suppress(OSError):
            while True:
                used.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(more):
            os.close(used.pop())
        try:
            yield
        finally:
            for each in used:
                os.close(each)


def memory(found: Found, folder: Path) -> None:
    """Limit the address space in a first save, which needs memory, and in a second one, which has it.

    With less memory, Python waits forever for a new thread (python/cpython#140746).
    """
    for at in (1, 2):
        for more in (MIB, *(each * MIB for each in (4, 9, 16, 17, 24, 32, 36, 40, 44, 64))):
            limit = lambda more=more: limited_memory(more)  # noqa: E731
            trial(found, "memory", f"{more} at step {at}", folder / f"memory{at}-{more}", limit, at)


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Leave `more` bytes of address space, after using the stacks inherited from threads of the parent."""
    before, over = address_space(), threading.Event()
    idle: list[threading.Thread] = []
    while address_space() < before + MIB and len(idle) < MOST_STACKS:
        idle.append(threading.Thread(target=over.wait, daemon=True))
        idle[-1].start()
    try:
        with process_limit(resource.RLIMIT_AS, address_space() + more):
            yield
    finally:
        over.set()
        for thread in idle:
            thread.join()


def address_space() -> int:
    """Return the bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system in memory."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def remounted(disk: Path, limited: str, back: str) -> Iterator[None]:
    """Change an option of a mounted disk for a while."""
    subprocess.run(["mount", "-o", f"remount,{limited}", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", f"remount,{back}", disk], check=True)


def full_disks(found: Found, folder: Path) -> None:
    """Leave room for 0, 64, 128, ... KiB, until it suffices."""
    with small_disk(folder / "full") as disk:
        for more in range(0, MIB, 64 * KIB):
            directory = disk / f"run{more}"
            trial(found, "full disk", more, directory, lambda more=more: full(disk, more))  # type: ignore[misc]
            subprocess.run(["rm", "-rf", directory], check=True)


def full(disk: Path, more: int) -> Limited:
    """Leave room for `more` bytes on a disk."""
    used = os.statvfs(disk)
    size = (used.f_blocks - used.f_bfree) * used.f_frsize + more
    return remounted(disk, f"size={max(size, used.f_frsize)}", f"size={ROOMY}")


def read_only(found: Found, folder: Path) -> None:
    """Make a disk read-only, as after an error of the device."""
    with small_disk(folder / "read-only") as disk:
        trial(found, "read-only", "", disk / "run", lambda: remounted(disk, "ro", "rw"))


LIMITS: dict[str, Callable[[Found, Path], None]] = {
    "file size": file_sizes,
    "descriptors": descriptors,
    "memory": memory,
    "full disk": full_disks,
    "read-only": read_only,
}
_ON_DISKS = {"full disk", "read-only"}


def why_not(name: str) -> str | None:
    """Return why this machine cannot apply the limit, or None."""
    return why_no_mount() if name in _ON_DISKS else None


def campaign(names: list[str], folder: Path) -> Found:
    """Run all trials of these limits."""
    handler_of({})  # import what a save imports late, before memory is limited
    jax.devices()  # start JAX before memory is limited
    found = Found()
    for name in names:
        LIMITS[name](found, folder)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--flaw", choices=FLAWS, help="a control: run with this flaw")
    chosen, started = parser.parse_args(), time.monotonic()
    if chosen.flaw:
        FLAWS[chosen.flaw](pytest.MonkeyPatch())
    names = those_that_can(chosen.limits, why_not)
    warnings.simplefilter("ignore")
    logging.getLogger("jaxckpt_train").disabled = True
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(names, Path(folder))
    for name in names:
        print(f"{name}: {found.runs[name]} runs, in {found.failed[name]} of them the save was refused")
    leave_with(found.problems, started)


if __name__ == "__main__":
    main()
