"""Train for an hour with a save every second, on a disk that is slow, refuses, or does not respond at times.

`python -m tests.nightly.faults.soak --minutes 60`. One process trains all the time; after a failed save it makes a new
callback and resumes. Its memory, threads, open files, and the names in its directory must not grow; names are counted
all the time, not only after a cleanup. It must resume from the newest step that it knew to be committed, or a newer
one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import SILENCE_S
from jaxckpt_train.run.record import RECORD_NAME
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.fuse_disk import ANSWER, WEDGED, FuseDisk, fuse_disk, why_not
from tests.nightly.faults.needs import leave_if
from tests.support.paths import REPO_ROOT

ROOT = REPO_ROOT
KEPT = 3
KINDS: dict[str, Callable[[str], bool]] = {
    "steps": lambda name: name.startswith("step-"),
    "attempts": lambda name: ".tmp-" in name,
    "half made": lambda name: name.startswith(TEMPORARY_PREFIXES),
}
# The next owner removes leftovers of refused removals; temporary files of locks are removed after `SILENCE_S`.
MOST = {"steps": KEPT + 4, "attempts": 12, "half made": 120, "others": 6}
# The size of four states: pools vary by this much without a leak, and take minutes to fill.
MEMORY, AT_FIRST, SETTLED_S = 16 << 20, 48 << 20, 180
TRAINING = """
import json, os, sys, threading, time
import jax, jax.numpy as jnp
import jaxckpt_train as jct

directory, seconds, every_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
update = jax.jit(lambda state: {"w": state["w"] + 1.0}, donate_argnums=0)
ends, committed, failed, skipped, reported = time.monotonic() + seconds, 0, 0, 0, 0.0

def tell():
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    files = len(os.listdir("/proc/self/fd"))
    row = {"resident": resident, "threads": threading.active_count(), "files": files, "committed": committed,
           "failed": failed, "skipped": skipped}
    print(json.dumps(row), flush=True)

while time.monotonic() < ends:
    try:
        options = {"save_interval_secs": every_s, "keep_latest": int(sys.argv[4]), "stall_timeout_s": 2 * every_s}
        with jct.CheckpointCallback(directory, **options) as ckpt:
            state = ckpt.resume({"w": jnp.zeros(1 << 20)})
            step = ckpt.completed_steps
            assert step >= committed, f"resumed from {step}, but {committed} was committed"
            assert float(state["w"].min()) == float(state["w"].max()) == step, "a mixture"
            while time.monotonic() < ends:
                state, step = update(state), step + 1
                skipped += "skipped" in ckpt(state, step=step).reason
                committed = max(committed, ckpt.latest_step() or 0)
                if time.monotonic() > reported + 5 * every_s:
                    reported = time.monotonic()
                    tell()
                time.sleep(0.01)  # the step
    except (jct.StorageError, jct.CheckpointTimeoutError):
        failed += 1
tell()
"""


@dataclasses.dataclass
class Found:
    """The result of a soak: reports of the training, names in its directory by kind, and problems."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    names: list[dict[str, int]] = dataclasses.field(default_factory=list)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


def soak(seconds: float, seed: int, every_s: float, folder: Path, training: str = TRAINING) -> Found:
    """Train for `seconds`."""
    found, chance = Found(), random.Random(seed)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with fuse_disk(folder) as disk:
        run = disk.path / "run"
        command = [sys.executable, "-c", training, str(run), str(seconds), str(every_s), str(KEPT)]
        with (
            (folder / "reports").open("w", encoding="utf-8") as reports,
            (folder / "warnings").open("w", encoding="utf-8") as warnings,  # an unread pipe would block it
            subprocess.Popen(command, env=variables, stdout=reports, stderr=warnings) as process,
        ):
            try:
                for kind in _faults(disk, chance, every_s, lambda: found.names.append(count(disk.backing / "run"))):
                    found.faults[kind] += 1
                    if process.poll() is not None:
                        break
            finally:  # otherwise it would wait for the disk
                disk.set()
                process.kill()
        found.rows = [json.loads(line) for line in (folder / "reports").read_text(encoding="utf-8").splitlines()]
        if process.returncode != 0:
            errors = (folder / "warnings").read_text(encoding="utf-8")
            found.problems.append(f"the training ended with {process.returncode}: {errors[-1000:]}")
        with StepManager(run, preservation_policy=LatestN(KEPT)) as manager:  # the next owner cleans
            manager.save((manager.latest or 0) + 1, {"state": 0})  # and deletes leftovers of a late refusal
        names = sorted(os.listdir(run))
        found.problems += [f"left over: {name}" for name in names if _is_left(run / name)]
        steps = [name for name in names if name.startswith("step-")]
        if len(steps) > KEPT:
            records = _records_of(run, steps[:-KEPT])
            found.problems.append(f"{len(steps)} steps are there, and {KEPT} are kept: {records}")
    found.problems += growth(found.rows, seconds) + too_many(found.names) + standstill(found.rows)
    return found


def _records_of(run: Path, names: list[str]) -> list[str]:
    """Return the lines of history and record about steps."""
    files = [run / HISTORY_NAME, *sorted((run / RECORD_NAME).glob("*.json"))]
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line[:400] for line in lines if any(name in line for name in names[:3])]


def count(directory: Path) -> dict[str, int]:
    """Return the number of names of each kind in the directory of a run."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    counts = collections.Counter(
        next((kind for kind, is_of in KINDS.items() if is_of(name)), "others") for name in names
    )
    return {kind: counts[kind] for kind in MOST}


def too_many(names: list[dict[str, int]]) -> list[str]:
    """Return the kinds of names that exceeded their limit."""
    most = {kind: max((each[kind] for each in names), default=0) for kind in MOST}
    return [
        f"{found} {kind} at once, expected at most {MOST[kind]}" for kind, found in most.items() if found > MOST[kind]
    ]


def _faults(disk: FuseDisk, chance: random.Random, every_s: float, look: Callable[[], None]) -> Iterator[str]:
    while True:
        kind = chance.choice(("none", "none", "slow", "refuses", "wedged"))
        match kind:
            case "slow":
                disk.set(ANSWER, chance.uniform(0, every_s))
            case "refuses":
                disk.set(ANSWER, refused_per_mille=chance.choice((1, 10, 100)))
            case "wedged":
                disk.set(WEDGED)
            case _:
                disk.set()
        until = time.monotonic() + chance.uniform(0, 4 * every_s)  # keep the fault until then
        while (rest_s := until - time.monotonic()) > 0:
            time.sleep(min(rest_s, every_s))
            look()
        disk.set()
        yield kind


def _is_left(path: Path) -> bool:
    """Return whether a name is a leftover; recent temporary files of locks may be in use."""
    if path.name.startswith(TEMPORARY_PREFIXES):
        return time.time() - path.stat().st_mtime > SILENCE_S
    return ".tmp-" in path.name


def growth(rows: list[dict[str, Any]], seconds: float) -> list[str]:
    """Return the resources that grew from the second third to the last, beyond normal variation.

    Memory is compared by its minimum, because failures hold extra states for a while; a leak raises the minimum too.
    """
    second, last = rows[len(rows) // 3 : 2 * len(rows) // 3], rows[2 * len(rows) // 3 :]
    if not second or not last:
        return [f"only {len(rows)} rows were reported"]
    problems = []
    memory = MEMORY if seconds >= SETTLED_S else AT_FIRST
    for name, slack, of in (("resident", memory, min), ("threads", 2, max), ("files", 4, max)):
        before, after = (of(row[name] for row in part) for part in (second, last))
        if after > before + slack:
            problems.append(f"{name} grew from {before} to {after}")
    return problems


def standstill(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tenths of the time without a committed step, although the disk responded at times."""
    marks = [rows[number * (len(rows) - 1) // 10]["committed"] for number in range(11)] if len(rows) > 20 else []
    return [f"nothing was committed in tenth {at}" for at in range(10) if marks and marks[at] == marks[at + 1]]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    chosen, started = parser.parse_args(), time.monotonic()
    leave_if(why_not())
    with tempfile.TemporaryDirectory() as folder:
        found = soak(60 * chosen.minutes, chosen.seed, 1.0, Path(folder))
    print(
        f"{len(found.rows)} rows; the first {found.rows[:1]}, the last {found.rows[-1:]}; faults {dict(found.faults)}"
    )
    print(f"the most names at once: { {kind: max(each[kind] for each in found.names) for kind in MOST} }")
    leave_with(found.problems, started, chosen.seed)


if __name__ == "__main__":
    main()
