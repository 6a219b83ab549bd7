"""The same faults for ours and for Orbax: power cuts right after a save, flipped bits, interrupted calls.

`python -m benchmarks.faults`. Each campaign runs the subjects of `benchmarks/registry.py` in turn, each in forked
processes that saw no other one, on the same small state, and counts what a user would meet.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.subject import Subject
from benchmarks.subject_ours import Ours
from benchmarks.subjects_orbax import OrbaxV0, OrbaxV0WithoutOcdbt, OrbaxV1, OrbaxV1WithoutOcdbt
from tests.faults.forking import Tell, forked
from tests.faults.loop_disk import LoopDisk, loop_disk, why_not
from tests.faults.native_calls import COUNT, FAIL, NO_CALL, built
from tests.faults.needs import why_no_compiler

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "ours": Ours,
    "orbax_v1": OrbaxV1,
    "orbax_v1_no_ocdbt": OrbaxV1WithoutOcdbt,
    "orbax_v0": OrbaxV0,
    "orbax_v0_no_ocdbt": OrbaxV0WithoutOcdbt,
}
STEPS = 3
LONGEST_S = 300


@dataclasses.dataclass
class Row:
    """One subject in one campaign: how often what happened."""

    campaign: str
    subject: str
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, end: str, detail: str = "") -> None:
        """One trial."""
        self.ends[end] += 1
        self.first.setdefault(end, detail)


def state_of(step: int) -> dict[str, Any]:
    """Some 200 kB of arrays, as bytes by which the step is known."""
    import jax

    chance = np.random.default_rng(step)
    tree = {"w": chance.standard_normal((200, 128)), "small": {f"x{n}": chance.integers(0, 99, 7) for n in range(9)}}
    return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(np.float32), tree))


def abstract(state: Any) -> Any:
    """The target of a load."""
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def is_same(found: Any, expected: Any) -> bool:
    """Byte for byte."""
    import jax

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def save(subject: Subject, path: Path, state: Any) -> None:
    """A save, acknowledged when this returns."""
    wait = subject.start_save(path, state)
    if wait is not None:
        wait()


def outcome(subject: Subject, path: Path, step: int) -> tuple[str, str]:
    """What a load of a step comes to."""
    expected = state_of(step)
    try:
        found = subject.load(path, abstract(expected))
    except Exception as error:  # noqa: BLE001  # whatever the subject raises is what is counted
        return "error", f"{type(error).__name__}: {error}"[:200]
    return ("right", "") if is_same(found, expected) else ("silently wrong", "")


def power_cuts(name: str, trials: int, disk: LoopDisk) -> Row:
    """A save is acknowledged, and the power is cut at once; the file system is mounted again, and the step loaded."""
    row = Row("power cut right after the acknowledgement, ext4", name)
    for number in range(trials):
        if number % 10 == 0:
            disk.unmount()
            disk.make_new()
        path = disk.path / f"step{number}"

        def saving(tell: Tell, path: Path = path, number: int = number) -> None:
            save(SUBJECTS[name](), path, state_of(number))
            disk.cut_power()
            tell("acknowledged", None)

        told, _ = forked(saving, LONGEST_S)
        if ("acknowledged", None) not in told:
            row.add("save failed", str(told))
            continue
        disk.unmount()
        disk.mount()
        seen, _ = forked(
            lambda tell, path=path, n=number: tell("end", outcome(SUBJECTS[name](), path, n)),  # type: ignore[misc]
            LONGEST_S,
        )
        end = next((value for what, value in seen if what == "end"), ["error", str(seen)])
        row.add("right" if end[0] == "right" else f"lost: {end[0]}", end[1])
    return row


def flipped_bits(name: str, trials: int, seed: int, folder: Path) -> Row:
    """One bit of a checkpoint, chosen by its bytes, is flipped, and the step is loaded."""
    row = Row("one flipped bit", name)

    def work(tell: Tell) -> None:
        chance, subject, path = random.Random(seed), SUBJECTS[name](), folder / name
        save(subject, path, state_of(1))
        assert outcome(subject, path, 1)[0] == "right", "it is not loaded as it was saved even without damage"
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
        sizes = [file.stat().st_size for file in files]
        for _ in range(trials):
            file = chance.choices(files, sizes)[0]
            sound = file.read_bytes()
            data = bytearray(sound)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
            tell("end", outcome(subject, path, 1))
            file.write_bytes(sound)

    for what, value in forked(work, LONGEST_S)[0]:
        row.add(*(value if what == "end" else ("campaign failed", str(value)[:300])))
    return row


def interrupted_calls(name: str, trials: int, folder: Path) -> Row:
    """A loop that saves three times and loads the last, in which one native call is interrupted (EINTR)."""
    row = Row("one interrupted call", name)
    calls = _interrupted(name, NO_CALL, COUNT, folder)[1]
    for number in sorted({1 + round(each * (calls - 1) / max(1, trials - 1)) for each in range(trials)}):
        row.add(_interrupted(name, number, FAIL, folder)[0])
    row.first["calls"] = str(calls)
    return row


def _interrupted(name: str, number: int, kind: int, folder: Path) -> tuple[str, int]:
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()

    def work(tell: Tell) -> None:
        library = ctypes.CDLL(None)
        library.fi_seen.restype = ctypes.c_long
        states, subject = [state_of(step) for step in range(STEPS)], SUBJECTS[name]()
        library.fi_arm(os.fsencode(folder / "run"), ctypes.c_long(number), kind, errno.EINTR)
        try:
            for step, state in enumerate(states):
                save(subject, folder / "run" / f"step{step}", state)
            tell("end", outcome(subject, folder / "run" / f"step{STEPS - 1}", STEPS - 1)[0])
        except Exception as error:  # noqa: BLE001  # whatever the subject raises is what is counted
            tell("end", f"aborted: {type(error).__name__}")
        finally:
            tell("calls", library.fi_seen())
            library.fi_arm(b"", ctypes.c_long(NO_CALL), COUNT, 0)

    told = dict(forked(work, LONGEST_S)[0])
    return told.get("end", "died or hung"), told.get("calls", 0)


def in_turn(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """All campaigns that can run here, the subjects in turn."""
    rows: list[Row] = []
    names, reason = chosen.subjects, why_not("ext4")
    if reason is None:
        with loop_disk(folder, "ext4") as disk:
            rows += [power_cuts(name, chosen.cuts, disk) for name in names]
    else:
        print(f"power cuts: SKIP: {reason}")
    rows += [flipped_bits(name, chosen.flips, chosen.seed, folder) for name in names]
    if chosen.preloaded:
        rows += [interrupted_calls(name, chosen.calls, folder) for name in names]
    else:
        print(f"interrupted calls: SKIP: {why_no_compiler()}")
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--cuts", type=int, default=40, help="of each subject")
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    chosen, started = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        if not chosen.preloaded and why_no_compiler() is None:
            variables = {**os.environ, "LD_PRELOAD": str(built(Path(name))), "JAX_PLATFORMS": "cpu"}
            again = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:], "--preloaded"]
            raise SystemExit(subprocess.run(again, env=variables, check=False).returncode)
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(None):
            rows = in_turn(chosen, Path(name))
    for row in rows:
        print(f"{row.campaign}: {row.subject}: {dict(row.ends)}")
        for end, detail in row.first.items():
            if detail:
                print(f"    {end}: {detail}")
    print(f"{time.monotonic() - started:.0f} s, seed {chosen.seed}")
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    told = [
        {"campaign": row.campaign, "subject": row.subject, "ends": dict(row.ends), "first": row.first} for row in rows
    ]
    chosen.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
