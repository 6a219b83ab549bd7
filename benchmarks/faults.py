"""The same faults for ours and for Orbax: power cuts, flipped bits, interrupted calls.

`python -m benchmarks.faults`. The power is cut right after a save was acknowledged, and at random, of an ext4 and an
xfs. Each campaign runs the subjects of `benchmarks/registry.py` in turn, each in forked
processes that saw no other one, on the same small state, and counts what a user would meet.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from pathlib import Path

from benchmarks.faults_power import WHEN, power_cuts
from benchmarks.faults_trial import LONGEST_S, SUBJECTS, Row, outcome, save, state_of
from tests.nightly.faults.loop_disk import loop_disk, why_not
from tests.nightly.faults.native_calls import COUNT, FAIL, NO_CALL, built
from tests.nightly.faults.needs import why_no_compiler
from tests.support.forking import Tell, forked

STEPS = 3


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

    answers = dict(forked(work, LONGEST_S)[0])
    return answers.get("end", "died or hung"), answers.get("calls", 0)


def in_turn(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """All campaigns that can run here, the subjects in turn."""
    rows: list[Row] = []
    names = chosen.subjects
    for kind in chosen.kinds:
        reason = why_not(kind)
        if reason is not None:
            print(f"power cuts, {kind}: SKIP: {reason}", flush=True)
            continue
        (folder / kind).mkdir()
        with loop_disk(folder / kind, kind) as disk:
            for when in WHEN:
                rows += [power_cuts(name, when, chosen.cuts, chosen.seed, disk) for name in names]
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
    parser.add_argument("--kinds", nargs="+", choices=["ext4", "xfs"], default=["ext4", "xfs"])
    parser.add_argument("--cuts", type=int, default=20, help="of each kind, of each subject on each file system")
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
    rows = [
        {"campaign": row.campaign, "subject": row.subject, "ends": dict(row.ends), "first": row.first} for row in rows
    ]
    chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
