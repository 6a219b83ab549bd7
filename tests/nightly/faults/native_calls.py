"""Let each native call of some programs fail, fall short, get stuck, or be the last.

`python -m tests.nightly.faults.native_calls`

`native_programs.py` has the programs: saves with retention, pins and metrics, a roll-back, a take-over after a dead
owner, the replacement of a single checkpoint. A preloaded library counts the calls below their directory, and injects a
fault into the n-th: n is 1, 2, ... until a program makes fewer calls. Each run is a forked process, and so is each
check of its result: acknowledged saves are there, byte for byte, also pins and metrics; the next save succeeds; nothing
is left over. An interrupted, short or slow call must be invisible to the program; a refused write or sync of a save
must be noticed.

With `--controls`, each kind of fault is injected into a writer without one protection, which must be detected.
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
from tests.nightly.faults.native_programs import PROGRAMS, Program, by_kind, checked
from tests.nightly.faults.needs import COMPILER, leave_if, why_no_compiler
from tests.support.forking import Tell, forked

SOURCE = Path(__file__).with_name("native_faults.c")
COUNT, FAIL, FAIL_ON, SHORT, KILL_BEFORE, KILL_HALF, KILL_AFTER, STUCK = range(8)
NO_CALL, FEWEST = 1 << 40, 300  # no program has fewer calls
ON_BYTES = {"write", "pwrite64", "pwrite", "read", "preadv64v2", "preadv2", "pread64"}
MUST_SUCCEED = {"pwrite64", "pwrite", "ftruncate", "ftruncate64", "fsync", "fdatasync"}  # on a file of a save


@dataclasses.dataclass(frozen=True)
class Fault:
    """The fault of the n-th call; `is_seen`: whether the run may notice, `kills`: whether the process ends there."""

    kind: int
    error: int = 0
    is_seen: bool = True

    @property
    def kills(self) -> bool:
        """Whether the process ends at the call."""
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
    """A flawed writer, the fault and the program that must reveal the flaw, and its symptom.

    Attributes:
        stride: calls are tried with this stride until the flaw is detected, then those in between.
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
    """The result of a campaign: runs by fault, the calls of each program, and problems."""

    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failed: int = 0
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Stage:
    """The folder of one program; its initial content is made once."""

    name: str
    folder: Path
    events: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def program(self) -> Program:
        """The program."""
        return PROGRAMS[self.name]

    def __post_init__(self) -> None:
        if self.program.before is not None:
            shutil.rmtree(self.folder / "before", ignore_errors=True)
            before = self.program.before
            self.events = forked(lambda tell: before(self.folder / "before", tell))[0]
            assert not by_kind(self.events)["raised"], self.events

    def set_anew(self) -> Path:
        """Prepare the folder of the next run."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        if self.program.before is not None:
            shutil.copytree(self.folder / "before", self.folder / "run")
        return self.folder / "run"


def campaign(names: list[str], folder: Path, every: int = 1, programs: list[str] | None = None) -> Found:
    """Inject all faults at all calls, or at each `every`-th; in a process without threads.

    Raises:
        RuntimeError: a run ended early without being killed.
    """
    found, first = Found(), itertools.cycle(range(1, min(every, FEWEST) + 1, 41))
    for program in programs or PROGRAMS:
        stage = Stage(program, folder)
        for name in names:
            for number in itertools.count(next(first), every):
                ends = every > 1 and 0 < found.calls[program] < number  # otherwise it ends when a run has fewer calls
                if ends or not _one(found, stage, name, number):
                    break
    return found


def is_detected(control: Control, folder: Path) -> bool:
    """Return whether a flawed writer is detected at any call."""
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
    """Run one trial and check it; return False if the run has fewer calls."""
    fault, directory = FAULTS[name], stage.set_anew()
    lines, status = forked(lambda tell: _run_with(fault, number, stage.program, directory, tell))
    events = by_kind([*stage.events, *lines])
    if not events["calls"] and status != -signal.SIGKILL:
        raise RuntimeError(f"{stage.name}, {name} at call {number}: ended with {status}, with events {lines}")
    calls, call, path = events["calls"][0] if events["calls"] else (number, "", "")
    if calls < number:
        return False
    found.runs[name] += 1
    found.calls[stage.name] = max(found.calls[stage.name], calls)
    found.hit[call] += 1
    found.failed += len(events["failed"])
    expected = {-signal.SIGKILL if fault.kills else 0}
    if fault.kind == KILL_HALF and call not in ON_BYTES:
        expected.add(0)  # such a call cannot be half done
    problems = [] if status in expected else [f"the run ended with {status}: {' '.join(events['raised'])}"]
    problems += _event_problems(fault, [*stage.events, *lines], call, path)
    problems += checked(stage.program.check, directory, events)
    found.problems += [
        f"{stage.name}, {name} at call {number} ({call} {Path(path).name}): {problem}" for problem in problems
    ]
    return True


def _event_problems(fault: Fault, lines: list[tuple[str, Any]], call: str, path: str) -> list[str]:
    """Return the problems in the events of a run."""
    problems, events = [], by_kind(lines)
    if not fault.is_seen and events["failed"]:
        problems.append(f"the run noticed: {events['failed']}")
    if fault.kind == FAIL and fault.is_seen and call in MUST_SUCCEED and ".tmp-" in path and not events["failed"]:
        problems.append("the refusal was not noticed")
    if fault.kind == FAIL and len(events["failed"]) > 1:
        problems.append(f"one refusal cost more than one action: {events['failed']}")
    if fault.kind in (FAIL, SHORT, STUCK):
        problems += [f"one refusal, and the run went back to {restored}" for restored in _went_back(lines)]
    return problems


def _went_back(lines: list[tuple[str, Any]]) -> list[int]:
    """Return the saves that were restored although a later one was acknowledged."""
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
    """Compile the library."""
    library = folder / "native_faults.so"
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def preloaded(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module with the library preloaded."""
    variables = {**os.environ, "LD_PRELOAD": str(built(folder)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.nightly.faults.native_calls", "--preloaded", *arguments]
    return subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, check=False)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--every", type=int, default=1, help="only each N-th call")
    parser.add_argument("--controls", action="store_true", help="flawed writers, which must be detected")
    parser.add_argument("--folder", type=Path, help="where the programs run; faster in memory")
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
            is_found = is_detected(control, folder)
            print(f"{control.fault}: {control.flaw}: {'detected' if is_found else 'not detected'}", flush=True)
            problems += [] if is_found else [f"{control.fault}: {control.flaw}: was not detected"]
    return problems


if __name__ == "__main__":
    main()
