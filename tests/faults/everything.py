"""All campaigns, one after the other, as a table: `python -m tests.faults.everything --markdown build/reliability.md`.

Each is a command of its own, and what it says of problems, or why it is skipped, is its result. A campaign that was
skipped is in the table with its reason; one that found something, or fell over, is the exit code.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import subprocess
import sys
import time
from pathlib import Path

_COUNT = re.compile(r"\b(\d+) (?:problems|violations)\b")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """One command: what it is called in the table, its module, how many trials it takes by which option."""

    name: str
    module: str
    option: str | None = None
    trials: int = 0
    seeded: bool = True

    def command(self, share: float, seed: int) -> list[str]:
        """The command for so much of the trials."""
        trials = [] if self.option is None else [self.option, str(max(1, round(share * self.trials)))]
        return [sys.executable, "-m", self.module, *trials, *(["--seed", str(seed)] if self.seeded else [])]


@dataclasses.dataclass(frozen=True)
class Result:
    """One row: what ran, what it said, whether it is as it must be."""

    campaign: Campaign
    lines: tuple[str, ...]
    returncode: int
    seconds: float

    @property
    def verdict(self) -> str:
        """In the words of the table."""
        counts = [int(count) for line in self.lines for count in _COUNT.findall(line)]
        skips = [line for line in self.lines if "SKIP" in line]
        if self.returncode != 0 and not sum(counts):
            return f"fell over ({self.returncode})"
        said = f"{sum(counts)} problems" if counts else ""
        return "; ".join([*([said] if said else []), *skips]) or "said nothing"

    @property
    def is_right(self) -> bool:
        """Nothing found, and something said."""
        return self.returncode == 0 and self.verdict != "said nothing"


CAMPAIGNS = (
    Campaign("crash states, in memory", "tests.crash.explorer", "--states", 1_000_000),
    Campaign("crash states of real devices, ext4 and xfs", "tests.faults.block_replay", "--states", 20_000),
    Campaign("power cuts, ext4 and xfs", "tests.faults.power_cut", "--trials", 2000),
    Campaign("every native call fails, falls short, is the last", "tests.faults.native_calls", seeded=False),
    Campaign("a training ends at every call on a file", "tests.faults.boundaries", seeded=False),
    Campaign("SIGKILL at random", "tests.faults.random_kills", "--kills", 5000),
    Campaign("limits of disk and process", "tests.faults.limits", seeded=False),
    Campaign("damage", "tests.faults.corruption", "--trials", 100_000),
    Campaign("owners and readers, against a model", "tests.faults.owners", "--sequences", 5000),
    Campaign("owners and readers, real processes", "tests.faults.many_processes", "--rounds", 500),
    Campaign("hostile files", "tests.faults.hostile", "--executions", 20_000_000),
    Campaign("deadlines", "tests.faults.deadline", "--trials", 300),
    Campaign("soak", "tests.faults.soak", "--minutes", 60),
)


def run(campaign: Campaign, share: float, seed: int) -> Result:
    """One campaign; what it prints is shown as well."""
    started = time.monotonic()
    with subprocess.Popen(campaign.command(share, seed), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line.strip())
    return Result(campaign, tuple(lines), process.returncode, time.monotonic() - started)


def table(results: list[Result], share: float, seed: int, today: datetime.date) -> str:
    """As markdown."""
    rows = [f"{today}, seed {seed}:", "", "| campaign | trials | found | time |", "|---|---|---|---|"]
    for result in results:
        trials = f"{max(1, round(share * result.campaign.trials)):,}" if result.campaign.option else "all"
        rows.append(f"| {result.campaign.name} | {trials} | {result.verdict} | {result.seconds:.0f} s |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in CAMPAIGNS])
    parser.add_argument("--markdown", type=Path, default=Path("build/reliability.md"))
    chosen = parser.parse_args()
    results = []
    for campaign in CAMPAIGNS:
        if chosen.only is None or campaign.name in chosen.only:
            print(campaign.name, flush=True)
            results.append(run(campaign, chosen.share, chosen.seed))
    text = table(results, chosen.share, chosen.seed, datetime.datetime.now(datetime.UTC).date())
    chosen.markdown.parent.mkdir(parents=True, exist_ok=True)
    chosen.markdown.write_text(text, encoding="utf-8")
    print(text)
    raise SystemExit(not all(result.is_right for result in results))


if __name__ == "__main__":
    main()
