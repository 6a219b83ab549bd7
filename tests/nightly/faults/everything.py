"""Run all campaigns in sequence, and write a table.

`python -m tests.nightly.faults.everything --markdown build/reliability.md`

Each campaign is a command; its result is the printed number of problems, or the reason for a skip. The table is written
after each campaign, so that an aborted run has its rows. A skipped campaign is in the table with its reason. The exit
code is 1 if a campaign found problems or fell over, and 0 otherwise.

In full the campaigns take some twelve hours on two cores. With `--parts 40 --keep build/campaigns` each one runs in 40
parts, whose results are kept. After an interruption, the same command at the same commit continues with the next part.
Two such commands may run different campaigns at the same time.
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

import msgspec

from tests.nightly.faults.needs import SKIPPED
from tests.support.paths import REPO_ROOT

ROOT = REPO_ROOT
_COUNT = re.compile(r"\b(\d+) (?:problems|violations)\b")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """One command: its key, its name in the table, its module, and the option for its number of trials.

    Attributes:
        each: whether the option is a stride N, which runs each N-th of all trials; without it, all run.
        some: whether the option is passed only for fewer than all trials.
        apart: the difference between the seeds of two parts without a trial in common; 0: it has no parts.
    """

    key: str
    name: str
    module: str
    option: str | None = None
    trials: int = 0
    seeded: bool = True
    each: bool = False
    some: bool = False
    more: tuple[str, ...] = ()
    apart: int = 1

    def amount(self, share: float) -> int:
        """Return the number of trials, or the stride."""
        return max(1, round(1 / share if self.each else share * self.trials))

    def command(self, share: float, seed: int) -> list[str]:
        """Return the command for a share of the trials."""
        has_trials = self.option is not None and not (self.some and share >= 1)
        trials = [str(self.option), str(self.amount(share))] if has_trials else []
        seeds = ["--seed", str(seed)] if self.seeded else []
        return [sys.executable, "-m", self.module, *self.more, *trials, *seeds]

    def shown_trials(self, share: float, parts: int = 1) -> str:
        """Return the number of trials as the table shows it."""
        if self.option is None or ((self.each or self.some) and share >= 1):
            return "all"
        return f"each {self.amount(share)}th" if self.each else f"{parts * self.amount(share / parts):,}"

    def shown_seeds(self, seed: int, parts: int) -> str:
        """Return the seeds as the table shows them."""
        if not self.seeded:
            return "none"
        return str(seed) if parts == 1 else f"{seed} to {seed + (parts - 1) * self.apart}"


@dataclasses.dataclass(frozen=True)
class Result:
    """One row: the campaign, its output, its exit code, its time, the commit, and the number of parts."""

    campaign: Campaign
    lines: tuple[str, ...]
    returncode: int
    seconds: float
    began: datetime.date
    commit: str
    parts: int = 1

    @property
    def verdict(self) -> str:
        """The result as the table shows it."""
        counts = [int(count) for line in self.lines for count in _COUNT.findall(line)]
        skips = [line for line in self.lines if "SKIP: " in line]
        if not self.has_ended and not sum(counts):
            return f"fell over ({self.returncode})"
        said = f"{sum(counts)} problems" if counts else ""
        return "; ".join([*([said] if said else []), *skips]) or "said nothing"

    @property
    def has_ended(self) -> bool:
        """Whether it ended normally without problems."""
        return self.returncode == 0 or (self.returncode == SKIPPED and any("SKIP: " in line for line in self.lines))

    @property
    def is_right(self) -> bool:
        """Whether it ended normally and printed a result."""
        return self.has_ended and self.verdict != "said nothing"


_FAULTS, _UNCHANGED = "tests.nightly.faults", "tests.nightly.unchanged"
CAMPAIGNS = (
    Campaign(
        "crash-states", "crash states, in memory", "tests.nightly.crash.explorer", "--states", 1_000_000, apart=10_000,
    ),
    Campaign("block-replay", "crash states of real devices", f"{_FAULTS}.block_replay", "--states", 20_000),
    Campaign("power-cuts", "power cuts", f"{_FAULTS}.power_cut", "--trials", 2000),
    Campaign(
        "native-calls", "every native call fails, falls short, is the last", f"{_FAULTS}.native_calls", "--every",
        seeded=False, each=True,
    ),
    Campaign(
        "native-call-controls", "the same calls of writers with flaws, which are detected",
        f"{_FAULTS}.native_calls", seeded=False, more=("--controls",),
    ),
    Campaign(
        "boundaries", "a training ends at every call on a file", f"{_FAULTS}.boundaries", "--most", 73,
        seeded=False, some=True,
    ),
    Campaign("random-kills", "SIGKILL at random, of processes that save", f"{_FAULTS}.random_kills", "--kills", 5000),
    Campaign(
        "kill-campaign", "SIGKILL at random, of a training", "tests.nightly.kill.campaign", "--kills", 60, apart=0,
    ),
    Campaign("limits", "limits of disk and process", f"{_FAULTS}.limits", seeded=False),
    Campaign("corruption", "damage", f"{_FAULTS}.corruption", "--trials", 100_000),
    Campaign("owners", "owners and readers, against a model", f"{_FAULTS}.owners", "--sequences", 5000),
    Campaign("many-processes", "owners and readers, real processes", f"{_FAULTS}.many_processes", "--rounds", 500),
    Campaign("hostile", "hostile files", f"{_FAULTS}.hostile", "--executions", 20_000_000),
    Campaign(
        "hostile-atheris", "hostile files that atheris chooses", f"{_FAULTS}.hostile", "--executions", 20_000_000,
        more=("--atheris",),
    ),
    Campaign("deadlines", "deadlines", f"{_FAULTS}.deadline", "--trials", 300),
    Campaign(
        "unchanged", "unchanged leaves, against a model", f"{_UNCHANGED}.sequences", "--sequences", 20_000,
        apart=20_000,
    ),
    Campaign(
        "unchanged-deletions", "deletions of steps that share files", f"{_UNCHANGED}.deletions", "--sequences", 5000,
        apart=5000,
    ),
    Campaign("unchanged-damage", "damage of files that steps share", f"{_UNCHANGED}.shared_damage", "--trials", 10_000),
    Campaign("soak", "soak, minutes", f"{_FAULTS}.soak", "--minutes", 60, apart=0),
)  # fmt: skip
KEYS = tuple(each.key for each in CAMPAIGNS)


def run(campaign: Campaign, share: float, seed: int) -> Result:
    """Run one campaign, and print its output."""
    started, today, commit = time.monotonic(), datetime.datetime.now(datetime.UTC).date(), version()
    with subprocess.Popen(campaign.command(share, seed), stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line.strip())
    return Result(campaign, tuple(lines), process.returncode, time.monotonic() - started, today, commit)


def run_in_parts(campaign: Campaign, share: float, seed: int, parts: int, keep: Path | None) -> Result:
    """Run a campaign in parts with seeds of their own, except for parts whose results are kept from this commit."""
    parts = parts if campaign.seeded and campaign.apart else 1
    found = list[Result]()
    for number in range(parts):
        first = seed + number * campaign.apart
        file = None if keep is None else keep / f"{campaign.key}-{share:g}-{parts}-{first}.json"
        result = None if file is None or not file.exists() else msgspec.json.decode(file.read_bytes(), type=Result)
        if result is None or not result.is_right or result.commit != version():
            result = run(campaign, share / parts, first)
            if file is not None:
                file.write_bytes(msgspec.json.encode(result))
        found.append(result)
    return Result(
        campaign,
        tuple(line for each in found for line in each.lines),
        next((each.returncode for each in found if not each.has_ended), found[-1].returncode),
        sum(each.seconds for each in found),
        min(each.began for each in found),
        found[0].commit,
        parts,
    )


def version() -> str:
    """Return the current commit, and whether files differ from it."""
    outputs = []
    for command in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        outputs.append(done.stdout.strip())
    return outputs[0] + (", dirty" if outputs[1] else "")


def table(results: list[Result], share: float, seed: int) -> str:
    """Return the table in markdown."""
    rows = ["| campaign | trials | found | seed | date | time | commit |", "|---|---|---|---|---|---|---|"]
    for result in results:
        campaign = result.campaign
        cells = [
            campaign.name, campaign.shown_trials(share, result.parts), result.verdict.replace("|", "/"),
            campaign.shown_seeds(seed, result.parts), str(result.began), f"{result.seconds:.0f} s", result.commit,
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def chosen_keys(text: str) -> list[str]:
    """Return the keys in a comma-separated list.

    Raises:
        ArgumentTypeError: there is no such campaign.
    """
    keys = [key.strip() for key in text.split(",") if key.strip()]
    if unknown := [key for key in keys if key not in KEYS]:
        raise argparse.ArgumentTypeError(f"no campaign {', '.join(unknown)}; there are {', '.join(KEYS)}")
    return keys


def share_of_all(text: str) -> float:
    """Return a share that is more than 0 and at most 1.

    Raises:
        ArgumentTypeError: it is out of range.
    """
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, found {text}")
    return share


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=share_of_all, default=1.0, help="of all trials, such as 0.01")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=chosen_keys, default=list(KEYS), help=f"of {', '.join(KEYS)}; with commas")
    parser.add_argument("--markdown", type=Path, default=Path("build/reliability.md"))
    parser.add_argument("--parts", type=int, default=1, help="in how many parts each campaign runs")
    parser.add_argument("--keep", type=Path, help="a folder for the results of the parts")
    chosen, results, text = parser.parse_args(), [], ""
    for folder in filter(None, (chosen.markdown.parent, chosen.keep)):
        folder.mkdir(parents=True, exist_ok=True)
    for campaign in CAMPAIGNS:
        if campaign.key in chosen.only:
            print(campaign.name, flush=True)
            results.append(run_in_parts(campaign, chosen.share, chosen.seed, chosen.parts, chosen.keep))
            text = table(results, chosen.share, chosen.seed)
            chosen.markdown.write_text(text, encoding="utf-8")
    print(text)
    raise SystemExit(not all(result.is_right for result in results))


if __name__ == "__main__":
    main()
