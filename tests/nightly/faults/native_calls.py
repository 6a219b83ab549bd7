"""Lets each native call of some programs fail, fall short, be stuck, or be the last.

`python -m tests.nightly.faults.native_calls`

`native_programs.py` has the programs: saves with retention, pins and metrics, a roll-back, a take-over after a dead
owner, the replacement of a single checkpoint. A library that is loaded before all others counts the calls below their
directory, and does something to the n-th: n is 1, 2, ... until a program is over before it. Each run is a forked
process, and so is each look at what it left: what was acknowledged is there, byte for byte, also pins and metrics; the
next save succeeds; nothing is left over. Where a signal interrupts a call, or a call does less than was asked or takes
long, a program must not notice anything; where bytes or a sync of a save are refused, it must.

`python -m tests.nightly.faults.native_calls`. With `--controls` each kind of fault meets a writer that has one
protection less, which must be found out.
"""

from __future__ import annotations

import argparse
import collections
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

import pytest

from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.native_programs import PROGRAMS, Program, by_kind, looked
from tests.nightly.faults.needs import COMPILER, leave_if, why_no_compiler
from tests.support.forking import Tell, forked

SOURCE = Path(__file__).with_name("native_faults.c")
COUNT, FAIL, FAIL_ON, SHORT, KILL_BEFORE, KILL_HALF, KILL_AFTER, STUCK = range(8)
NO_CALL, FEWEST = 1 << 40, 300  # no program has fewer calls
ON_BYTES = {"write", "pwrite64", "pwrite", "read", "preadv64v2", "preadv2", "pread64"}
MUST_SUCCEED = {"pwrite64", "pwrite", "ftruncate", "ftruncate64", "fsync", "fdatasync"}  # on a file of a save


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
    "stuck": Fault(STUCK, is_seen=False),
    "EIO for ever": Fault(FAIL_ON, errno.EIO),
    "ENOSPC for ever": Fault(FAIL_ON, errno.ENOSPC),
    "SIGKILL before": Fault(KILL_BEFORE),
    "SIGKILL half-way": Fault(KILL_HALF),
    "SIGKILL after": Fault(KILL_AFTER),
}


@dataclasses.dataclass(frozen=True)
class Control:
    """A writer with a flaw, the program in which a kind of fault must bring it to light, and how that is told.

    Attributes:
        stride: all calls are tried until it is found out, first each so manieth; the one that took fewest.
    """

    fault: str
    flaw: str
    program: str
    symptom: str
    stride: int = 41


CONTROLS = (
    Control("EIO", "errors of syncs are ignored", "steps", "was not noticed", 10),
    Control("ENOSPC", "errors of writes are ignored", "steps", "CorruptCheckpointError", 29),
    Control("EDQUOT", "a quota that is used up is ignored", "replacement", "CorruptCheckpointError", 17),
    Control("EINTR", "no second try after a signal", "replacement", "the run noticed"),
    Control("short", "a short write is taken for a whole one", "steps", "CorruptCheckpointError", 29),
    Control("stuck", "gives up at once", "steps", "the run noticed"),
    Control("EIO for ever", "a save that failed is forgotten", "steps", "was acknowledged"),
    Control("ENOSPC for ever", "a save that failed is forgotten", "roll-back", "was acknowledged"),
    Control("SIGKILL before", "deletes first", "steps", "are gone"),
    Control("SIGKILL half-way", "publishes late", "take-over", "was acknowledged", 67),
    Control("SIGKILL after", "publishes late", "roll-back", "was acknowledged"),
    Control("SIGKILL after", "pins in memory only", "notes", "are gone"),
)


@dataclasses.dataclass
class Found:
    """What a campaign came to: runs by fault, the calls of each program, and what must not be."""

    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failed: int = 0
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Stage:
    """Where one program runs again and again; what it finds there was made once."""

    name: str
    folder: Path
    told: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def program(self) -> Program:
        """What runs."""
        return PROGRAMS[self.name]

    def __post_init__(self) -> None:
        if self.program.before is not None:
            shutil.rmtree(self.folder / "before", ignore_errors=True)
            before = self.program.before
            self.told = forked(lambda tell: before(self.folder / "before", tell))[0]
            assert not by_kind(self.told)["raised"], self.told

    def set_anew(self) -> Path:
        """Where the next run is to be."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        if self.program.before is not None:
            shutil.copytree(self.folder / "before", self.folder / "run")
        return self.folder / "run"


def campaign(names: list[str], folder: Path, every: int = 1, programs: list[str] | None = None) -> Found:
    """All faults at all calls, or at every so many, first at another one for each; in a process that has no threads.

    Raises:
        RuntimeError: a run did not come to its end, and nobody killed it.
    """
    found, first = Found(), itertools.cycle(range(1, min(every, FEWEST) + 1, 41))
    for program in programs or PROGRAMS:
        stage = Stage(program, folder)
        for name in names:
            for number in itertools.count(next(first), every):
                ends = every > 1 and 0 < found.calls[program] < number  # else it ends when a run passes untouched
                if ends or not _one(found, stage, name, number):
                    break
    return found


def is_found_out(control: Control, folder: Path) -> bool:
    """Whether a writer with a flaw is; the calls are tried until it is."""
    found = Found()
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(control.program, folder)
        FLAWS[control.flaw](patch)
        for first in range(control.stride):
            for number in itertools.count(1 + first, control.stride):
                if not _one(found, stage, control.fault, number):
                    break
                if any(control.symptom in problem for problem in found.problems):
                    return True
    return False


def _one(found: Found, stage: Stage, name: str, number: int) -> bool:
    """One run and the look at it; False if the run has fewer calls."""
    fault, directory = FAULTS[name], stage.set_anew()
    lines, status = forked(lambda tell: _run_with(fault, number, stage.program, directory, tell))
    told = by_kind([*stage.told, *lines])
    if not told["calls"] and status != -signal.SIGKILL:
        raise RuntimeError(f"{stage.name}, {name} at call {number}: ended with {status}, and told {lines}")
    calls, call, path = told["calls"][0] if told["calls"] else (number, "", "")
    if calls < number:
        return False
    found.runs[name] += 1
    found.calls[stage.name] = max(found.calls[stage.name], calls)
    found.hit[call] += 1
    found.failed += len(told["failed"])
    expected = {-signal.SIGKILL if fault.kills else 0}
    if fault.kind == KILL_HALF and call not in ON_BYTES:
        expected.add(0)  # there is no half of it
    problems = [] if status in expected else [f"the run ended with {status}: {' '.join(told['raised'])}"]
    problems += _wrongly_told(fault, [*stage.told, *lines], call, path)
    problems += looked(stage.program.look, directory, told)
    found.problems += [
        f"{stage.name}, {name} at call {number} ({call} {Path(path).name}): {problem}" for problem in problems
    ]
    return True


def _wrongly_told(fault: Fault, lines: list[tuple[str, Any]], call: str, path: str) -> list[str]:
    """What a run must not tell of itself."""
    problems, told = [], by_kind(lines)
    if not fault.is_seen and told["failed"]:
        problems.append(f"the run noticed: {told['failed']}")
    if fault.kind == FAIL and fault.is_seen and call in MUST_SUCCEED and ".tmp-" in path and not told["failed"]:
        problems.append("the refusal was not noticed")
    if fault.kind == FAIL and len(told["failed"]) > 1:
        problems.append(f"one refusal cost more than one deed: {told['failed']}")
    if fault.kind in (FAIL, SHORT, STUCK):
        problems += [f"one refusal, and the run went back to {restored}" for restored in _went_back(lines)]
    return problems


def _went_back(lines: list[tuple[str, Any]]) -> list[int]:
    """The saves that were restored although a later one had been acknowledged."""
    newest, found = 0, []
    for what, token in lines:
        if what == "acknowledged":
            newest = max(newest, token)
        elif what == "restored" and token < newest:
            found.append(token)
    return found


def _run_with(fault: Fault, number: int, program: Program, directory: Path, tell: Tell) -> None:
    library = ctypes.CDLL(None)
    library.fi_seen.restype, library.fi_name.restype = ctypes.c_long, ctypes.c_char_p
    library.fi_path.restype = ctypes.c_char_p
    library.fi_arm(os.fsencode(directory), ctypes.c_long(number), fault.kind, fault.error)
    try:
        program.run(directory, tell)
    finally:
        calls, call, path = library.fi_seen(), library.fi_name().decode(), os.fsdecode(library.fi_path())
        library.fi_arm(b"", ctypes.c_long(NO_CALL), COUNT, 0)
        tell("calls", [calls, call, path])


def built(folder: Path) -> Path:
    """The library."""
    library = folder / "native_faults.so"
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def preloaded(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module with the library."""
    variables = {**os.environ, "LD_PRELOAD": str(built(folder)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.nightly.faults.native_calls", "--preloaded", *arguments]
    return subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, check=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--every", type=int, default=1, help="only each so manieth call")
    parser.add_argument("--controls", action="store_true", help="writers with flaws, which must be found out")
    parser.add_argument("--folder", type=Path, help="where the programs run: in memory it is faster; a temporary one")
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    chosen, started = parser.parse_args(), time.monotonic()
    leave_if(why_no_compiler())
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        if not chosen.preloaded:
            done = preloaded(Path(name), *sys.argv[1:])
            print(done.stdout, end="")
            raise SystemExit(done.returncode)
        warnings.simplefilter("ignore")
        logging.getLogger("jaxckpt_train").disabled = True
        if chosen.controls:
            problems = _with_flaws(chosen.faults, Path(name))
        else:
            found = campaign(chosen.faults, Path(name), chosen.every, chosen.programs)
            problems = found.problems
            print(json.dumps({"runs": found.runs, "calls": found.calls, "hit": found.hit, "failed": found.failed}))
    leave_with(problems, started)


def _with_flaws(faults: list[str], folder: Path) -> list[str]:
    problems = []
    for control in CONTROLS:
        if control.fault in faults:
            is_found = is_found_out(control, folder)
            print(f"{control.fault}: {control.flaw}: {'found out' if is_found else 'not found out'}", flush=True)
            problems += [] if is_found else [f"{control.fault}: {control.flaw}: was not found out"]
    return problems


if __name__ == "__main__":
    main()
