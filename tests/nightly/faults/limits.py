"""Lets a run meet the limits of its machine: a full disk, one that is read-only, limits of the process.

`python -m tests.nightly.faults.limits`. A run saves one step, then meets the limit in the second, then is rid of it
and saves a third one. The second is acknowledged, or its error is one of ours, and says of what it is, what was refused
and what to do about it; whatever it was, the others are not touched, and nothing is left over, not even as long as the
process lives. Each run is a forked process, and so is the look at what it left.
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

from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from tests.nightly.faults.campaign_end import leave_with, those_that_can
from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.known_states import KEPT, SETTINGS, checkpointables_of, token_in
from tests.nightly.faults.native_programs import by_kind, inspect_run, looked
from tests.nightly.faults.needs import why_no_mount
from tests.support.forking import LONGEST_S, Tell, forked

KIB, MIB = 1 << 10, 1 << 20
ROOMY = 64 * MIB
Limited = contextlib.AbstractContextManager[None]


@dataclasses.dataclass
class Found:
    """What a campaign came to: runs by limit, in how many of them the second save failed, and what must not be."""

    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Clear:
    """What an error must say, as patterns: what was refused, what to do, and of what it is if not of the run's path."""

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
    """What the error of a save that met this limit does not say."""
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
        tell("left", [name for name in os.listdir(directory) if ".tmp-" in name])


def trial(found: Found, name: str, value: object, directory: Path, limit: Callable[[], Limited], at: int = 2) -> None:
    """One run, and the look at what it left."""
    lines, status = forked(lambda tell: run(directory, limit, at, tell))
    told = by_kind(lines)
    problems = [] if status == 0 else [f"the run ended with {status}: {' '.join(told['raised'])}"]
    failed = [step for step, _ in told["failed"]]
    found.runs[name] += 1
    found.failed[name] += failed == [at]
    if set(failed) - {at}:
        problems.append(f"the limit was over, and yet: {told['failed']}")
    problems += [f"{UNCLEAR} {lack}: {text}" for _, text in told["failed"] for lack in lacks(name, directory, text)]
    known = " ".join(text for _, text in told["failed"] if "could not be removed" in text)
    problems += [f"left over in a life: {left}" for names in told["left"] for left in names if left not in known]
    if told["restored"] != [3]:
        problems.append(f"restored {told['restored']}")
    problems += looked(inspect_run, directory, told)
    found.problems += [f"{name} {value}: {problem}" for problem in problems]


@contextlib.contextmanager
def process_limit(kind: int, value: int) -> Iterator[None]:
    """A soft limit of this process."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def file_sizes(found: Found, folder: Path) -> None:
    """No file may be larger than so many bytes."""
    for number, value in enumerate((0, 1, 100, 4095, 4096, 5000, 200_000, 320_000, 330_000, 400_000)):
        limit = lambda value=value: process_limit(resource.RLIMIT_FSIZE, value)  # noqa: E731
        trial(found, "file size", value, folder / f"size{number}", limit)


def descriptors(found: Found, folder: Path) -> None:
    """So many more files may be open."""
    for more in range(14):
        trial(found, "descriptors", more, folder / f"descriptors{more}", lambda more=more: only_so_many(more))  # type: ignore[misc]


@contextlib.contextmanager
def only_so_many(more: int) -> Iterator[None]:
    """So many more files may be open, whichever numbers are free."""
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
    """So much more address space, for a first save, which needs memory, and for a second one, which has it.

    Less than that, and Python waits for ever for a new thread (python/cpython#140746).
    """
    for at in (1, 2):
        for more in (MIB, *(each * MIB for each in (4, 9, 16, 17, 24, 32, 36, 40, 44, 64))):
            limit = lambda more=more: so_much_memory(more)  # noqa: E731
            trial(found, "memory", f"{more} at step {at}", folder / f"memory{at}-{more}", limit, at)


@contextlib.contextmanager
def so_much_memory(more: int) -> Iterator[None]:
    """So many bytes more of address space. A forked process has the stacks of its parent's threads: they are taken."""
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
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system in memory."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def remounted(disk: Path, limited: str, back: str) -> Iterator[None]:
    """A disk that has another option for a while."""
    subprocess.run(["mount", "-o", f"remount,{limited}", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", f"remount,{back}", disk], check=True)


def full_disks(found: Found, folder: Path) -> None:
    """Room for 0, 64, 128, ... KiB more, until there is enough."""
    with small_disk(folder / "full") as disk:
        for more in range(0, MIB, 64 * KIB):
            directory = disk / f"run{more}"
            trial(found, "full disk", more, directory, lambda more=more: full(disk, more))  # type: ignore[misc]
            subprocess.run(["rm", "-rf", directory], check=True)


def full(disk: Path, more: int) -> Limited:
    """A disk with room for so many bytes more."""
    used = os.statvfs(disk)
    size = (used.f_blocks - used.f_bfree) * used.f_frsize + more
    return remounted(disk, f"size={max(size, used.f_frsize)}", f"size={ROOMY}")


def read_only(found: Found, folder: Path) -> None:
    """A disk that became read-only, as after an error of the device."""
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
    """Why this limit cannot be met here; None: it can."""
    return why_no_mount() if name in _ON_DISKS else None


def campaign(names: list[str], folder: Path) -> Found:
    """All trials of these limits."""
    handler_of({})  # imports what a save would import late: not under a limit of memory
    jax.devices()  # nor starts JAX then
    found = Found()
    for name in names:
        LIMITS[name](found, folder)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--flaw", choices=FLAWS, help="a control: what a writer could do wrong")
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
