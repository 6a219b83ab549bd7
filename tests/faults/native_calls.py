"""Lets every native call of a run fail, fall short, or be its last: `python -m tests.faults.native_calls`.

The run saves steps, deletes old ones and restores. A library that is loaded before all others counts the calls below
its directory, and does something to the n-th: n is 1, 2, ... until a run is over before it. Each run is a forked
process, and so is each look at what it left: what was acknowledged is there, byte for byte; the next save succeeds;
nothing is left over. Without faults, and where a signal interrupts a call or a call does less than was asked, a run
must not notice anything.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import errno
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.errors import CheckpointError, StepNotFoundError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.lock import LOCK_NAME
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.preservation_policies import LatestN
from jaxckpt_train.store import local, local_names
from jaxckpt_train.store.backend import HALF_MADE
from tests.faults.forking import LONGEST_S, Tell, forked

SOURCE = Path(__file__).with_name("native_faults.c")
STEPS, KEPT, SIZE = 4, 2, 40_000
SETTINGS = StoreSettings(io_threads=1, staging_bytes=16 << 20)
COUNT, FAIL, FAIL_ON, SHORT, KILL_BEFORE, KILL_HALF, KILL_AFTER = range(7)
NO_CALL = 1 << 40
ON_BYTES = {"write", "pwrite64", "pwrite", "read", "preadv64v2", "preadv2", "pread64"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done to the n-th call; `is_seen`: whether the run may notice, `kills`: whether it ends there."""

    kind: int
    error: int = 0
    is_seen: bool = True

    @property
    def kills(self) -> bool:
        """Whether the process ends there."""
        return self.kind in (KILL_BEFORE, KILL_HALF, KILL_AFTER)


FAULTS = {
    "EIO": Fault(FAIL, errno.EIO),
    "ENOSPC": Fault(FAIL, errno.ENOSPC),
    "EDQUOT": Fault(FAIL, errno.EDQUOT),
    "EINTR": Fault(FAIL, errno.EINTR, is_seen=False),
    "short": Fault(SHORT, is_seen=False),
    "EIO for ever": Fault(FAIL_ON, errno.EIO),
    "ENOSPC for ever": Fault(FAIL_ON, errno.ENOSPC),
    "SIGKILL before": Fault(KILL_BEFORE),
    "SIGKILL half-way": Fault(KILL_HALF),
    "SIGKILL after": Fault(KILL_AFTER),
}


@dataclasses.dataclass
class Found:
    """What a campaign came to: runs by fault, the most calls of a run, and what must not be."""

    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    calls: int = 0
    failed_saves: int = 0
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


def state_of(step: int) -> dict[str, Any]:
    """A state that tells by all its bytes which step it is of."""
    chance = np.random.default_rng(step)
    return {"w": chance.standard_normal(SIZE), "small": {f"x{n}": chance.integers(0, 99, 7) for n in range(5)}}


def checkpointables_of(step: int) -> dict[str, Any]:
    """What is saved: arrays and a position in the data."""
    return {"state": state_of(step), "data": JsonValue({"position": step})}


def step_of(restored: dict[str, Any]) -> int:
    """Which step it is of, all of it; AssertionError: it is a mixture."""
    step = int(restored["data"].value["position"])
    expected, state = state_of(step), restored["state"]
    assert state["w"].tobytes() == expected["w"].tobytes(), f"w is not that of step {step}"
    for name, array in expected["small"].items():
        assert state["small"][name].tobytes() == array.tobytes(), f"{name} is not that of step {step}"
    return step


def run(directory: Path, tell: Tell) -> None:
    """The program: what is acknowledged, and what fails, is told at once."""
    manager = StepManager(directory, preservation_policy=LatestN(KEPT), settings=SETTINGS)
    for step in range(1, STEPS + 1):
        try:
            manager.save(step, checkpointables_of(step))
            manager.wait(LONGEST_S)
        except CheckpointError as error:
            tell("failed", f"step {step}: {error}")
        else:
            tell("acknowledged", step)
    for call in (lambda: tell("restored", step_of(manager.restore())), manager.close):
        try:
            call()
        except CheckpointError as error:
            tell("failed", str(error))
    tell("over", None)


def look(directory: Path, acknowledged: list[int]) -> list[str]:
    """What is wrong with what a run left, for a process that owns it next."""
    problems = []
    newest = max(acknowledged, default=0)
    with StepManager(directory, preservation_policy=LatestN(KEPT)) as manager:
        manager.own()
        try:
            step = step_of(manager.restore())
        except StepNotFoundError:
            step = 0
        if step < newest:
            problems.append(f"restored step {step}, but {newest} was acknowledged")
        for each in manager.steps:
            if step_of(manager.restore(step=each)) != each:
                problems.append(f"step {each} holds another")
        listed = manager.steps  # one that was committed, and not acknowledged any more, may have replaced an older one
        if missing := set(sorted({*acknowledged, *listed})[-KEPT:]) - set(listed):
            problems.append(f"{sorted(missing)} are gone; there are {manager.steps}")
        manager.restore() if step else None
        manager.save(STEPS + 1, checkpointables_of(STEPS + 1))
        manager.wait(LONGEST_S)
        if step_of(manager.restore()) != STEPS + 1:
            problems.append("the next save is not what is restored")
    harmless = (*HALF_MADE, f"{LOCK_NAME}.dead-")  # for a minute: somebody may be at work on it
    left = [name for name in os.listdir(directory) if name.startswith(".") and not name.startswith(harmless)]
    return problems + ([f"left over: {', '.join(sorted(left))}"] if left else [])


def _no_retries(patch: pytest.MonkeyPatch) -> None:
    for module in (local, local_names):
        patch.setattr(module, "again", lambda call, *args, **options: call(*args, **options))


def _ignores_errors(patch: pytest.MonkeyPatch) -> None:
    told = local._storage

    def untold(action: str, path: str) -> contextlib.AbstractContextManager[None]:
        is_write = action.startswith(("write", "finish"))
        return contextlib.suppress(OSError) if is_write else told(action, path)

    patch.setattr(local, "_storage", untold)


def _deletes_first(patch: pytest.MonkeyPatch) -> None:
    save = StepManager.save

    def deleting(self: StepManager, step: int, checkpointables: dict[str, Any]) -> object:
        listed = self.steps
        if len(listed) >= KEPT:
            shutil.rmtree(self.path(listed[0]))
        return save(self, step, checkpointables)

    patch.setattr(StepManager, "save", deleting)


def _acknowledges_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepManager, "wait", lambda self, timeout_s=None: None)


FLAWS = {
    "no retries": _no_retries,
    "errors are ignored": _ignores_errors,
    "deletes first": _deletes_first,
    "acknowledges early": _acknowledges_early,
}


def looked(directory: Path, acknowledged: list[int]) -> list[str]:
    """As `look`, in a process of its own."""
    seen, status = forked(lambda tell: tell("problems", look(directory, acknowledged)))
    problems = [problem for what, value in seen for problem in (value if what == "problems" else [value])]
    return problems if status == 0 else [*problems, f"the look ended with {status}"]


def campaign(names: list[str], folder: Path, every: int = 1) -> Found:
    """All faults at all calls, or at every so many; in a process that has the library, and no threads."""
    found = Found()
    for name in names:
        for number in itertools.count(1, every):
            if not _one(found, name, number, folder / "run"):
                break
    return found


def _one(found: Found, name: str, number: int, directory: Path) -> bool:
    """One run and the look at it; False if the run has fewer calls."""
    fault, subject = FAULTS[name], f"{name} at call {number}"
    shutil.rmtree(directory, ignore_errors=True)
    lines, status = forked(lambda tell: _run_with(fault, number, directory, tell))
    told: dict[str, list[Any]] = {
        name: [] for name in ("acknowledged", "failed", "restored", "over", "calls", "raised")
    }
    for what, value in lines:
        told[what].append(value)
    calls = told["calls"][0] if told["calls"] else [number, ""]
    if calls[0] < number:
        return False
    found.runs[name] += 1
    found.calls = max(found.calls, calls[0])
    found.hit[calls[1]] += 1
    found.failed_saves += len(told["failed"])
    expected = {-signal.SIGKILL if fault.kills else 0}
    if fault.kind == KILL_HALF and calls[1] not in ON_BYTES:
        expected.add(0)  # there is no half of it
    problems = [] if status in expected else [f"the run ended with {status}: {' '.join(told['raised'])}"]
    if not fault.is_seen and told["failed"]:
        problems.append(f"the run noticed: {told['failed']}")
    if fault.kind == FAIL and len(told["acknowledged"]) < STEPS - 1:
        problems.append(f"one refusal cost more than one save: {told['failed']}")
    if fault.kind in (FAIL, SHORT) and told["restored"] and told["restored"][0] < max(told["acknowledged"], default=0):
        problems.append(f"one refusal, and the run went back to {told['restored'][0]} of {told['acknowledged']}")
    problems += looked(directory, told["acknowledged"])
    found.problems += [f"{subject} ({calls[1]}): {problem}" for problem in problems]
    return True


def _run_with(fault: Fault, number: int, directory: Path, tell: Tell) -> None:
    library = ctypes.CDLL(None)
    library.fi_seen.restype, library.fi_name.restype = ctypes.c_long, ctypes.c_char_p
    library.fi_arm(os.fsencode(directory), ctypes.c_long(number), fault.kind, fault.error)
    try:
        run(directory, tell)
    finally:
        calls = library.fi_seen()
        library.fi_arm(b"", ctypes.c_long(NO_CALL), COUNT, 0)
        tell("calls", [calls, library.fi_name().decode()])


def why_not() -> str | None:
    """Why there can be no such campaign here; None: there can."""
    return None if sys.platform == "linux" and shutil.which("gcc") else "needs Linux and gcc"


def built(folder: Path) -> Path:
    """The library."""
    library = folder / "native_faults.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def preloaded(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module with the library."""
    variables = {**os.environ, "LD_PRELOAD": str(built(folder)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.faults.native_calls", "--preloaded", *arguments]
    return subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, check=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--every", type=int, default=1, help="only each so manieth call")
    parser.add_argument("--flaw", choices=FLAWS, help="a control: what a writer could do wrong")
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if not chosen.preloaded:
            done = preloaded(Path(name), *sys.argv[1:])
            print(done.stdout, end="")
            raise SystemExit(done.returncode)
        warnings.simplefilter("ignore")
        logging.getLogger("jaxckpt_train").disabled = True
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if chosen.flaw is not None:
                FLAWS[chosen.flaw](patch)
            found = campaign(chosen.faults, Path(name), chosen.every)
    print(json.dumps({"runs": found.runs, "calls": found.calls, "hit": found.hit, "failed": found.failed_saves}))
    print(f"{len(found.problems)} problems; {time.monotonic() - started:.0f} s")
    for problem in found.problems[:30]:
        print(f"  {problem}")
    raise SystemExit(bool(found.problems))


if __name__ == "__main__":
    main()
