"""End a training at every file operation that Python audits: `python -m tests.nightly.faults.boundaries`.

`ckpt-chaos` finds these boundaries by the audit events of the interpreter, ends a process at each (at once, or soon
after a SIGTERM), and starts the training again. It must resume after the newest complete step, and reach the result of
an undisturbed training, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.needs import leave_if
from tests.support.paths import REPO_ROOT

ROOT = REPO_ROOT
LONGEST_S, ALL = 120, 1_000_000
_VERDICT = re.compile(r"  (PASS|HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK|CONTROL_FAIL|[A-Z_]+)$")


@dataclasses.dataclass
class Found:
    """The result of a campaign: boundaries reached, boundaries missed, and verdicts other than PASS."""

    points: int = 0
    missed: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def why_not() -> str | None:
    """Return why this machine cannot run the campaign, or None."""
    return None if find_spec("ckpt_chaos") else "needs the package ckpt-chaos"


def campaign(folder: Path, most: int | None, how: str = "ours", modes: str = "before,torn,term") -> Found:
    """End a training at `most` boundaries, shared between the modes, or at all in each.

    Args:
        folder: an empty folder.
        most: the number of boundaries; None: all.
        how: the way to save: "ours", one of `FLAWS`, or "by_hand".
        modes: the ways to end the process.

    Raises:
        RuntimeError: ckpt-chaos gave no verdict.
    """
    out = [] if how == "by_hand" else ["--checkpoint-glob", "{out}/run/step-*", "--ckpt-ignore-size"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--work", folder / "work", "--timeout", str(LONGEST_S)),
            *(*out, "--step-regex", r"begins after step (\d+)", "--result-file", "{out}/result"),
            *("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL", "--modes", modes),
            *("--max-points", str(most or ALL)),
            *("--", sys.executable, "-m", "tests.nightly.faults.boundaries_training", "{out}", how),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line for line in done.stdout.splitlines() if _VERDICT.search(line)]
    problems = [line for line in rows if not line.endswith("PASS")]
    if not rows or (done.returncode != 0) != bool(problems):
        raise RuntimeError(f"ckpt-chaos ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    points = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("work/pt_[0-9]*/result.json")]
    reached = sum(point["crashed"] for point in points)  # the order of threads varies, so a run may have fewer calls
    return Found(reached, len(points) - reached, problems)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, help="number of boundaries; default: all")
    chosen, started = parser.parse_args(), time.monotonic()
    leave_if(why_not())
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), chosen.most)
    print(f"{found.points} ends at boundaries ({found.missed} were not reached)")
    leave_with(found.problems, started)


if __name__ == "__main__":
    main()
