"""A job whose hosts are killed and erased, with a fast tier and without: `python -m benchmarks.fast_tier_goodput`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command
from benchmarks.cells import TextTable
from benchmarks.fast_tier_goodput_turns import EMERGENCY, REPLICAS, SUBJECTS, Given, train
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.goodput_attempt import SHOWN_CHARACTERS, Attempt, AttemptFailedError
from benchmarks.goodput_facts import Facts, facts_of
from benchmarks.goodput_log import read
from benchmarks.goodput_summary import as_goodput, goodput_of
from benchmarks.loopback import free_address
from benchmarks.slow_disk import SlowDisk, slow_disk

PAGE = "fast-tier-goodput.md"
MIB = 1 << 20
HOSTS, UPDATE_S, SLOW_MIB_PER_S, STATE_MIB = 4, 0.1, 20.0, 128
SECONDS, QUICK_SECONDS, KILLS, QUICK_KILLS = 600.0, 60.0, 24, 3
FAST_STEPS, SLOW_STEPS = 20, 100
POLL_S, LONGEST_S = 0.1, 300.0
PRELOADED = [
    "benchmarks.fast_tier_goodput",
    "benchmarks.fast_tier_goodput_turns",
    "jax.experimental.multihost_utils",
    "jaxckpt_train.callback",
]

HOW_TO_READ = f"""\
{HOSTS} processes stand for hosts. Each kill ends one of them by SIGKILL at a random moment and erases its directory of
the fast tier, which is in memory; the job starts again at once. The moments and the hosts are the same for each set-up,
and the set-ups take turns, one attempt each. New processes are forked from one that has imported everything.
The slow tier delivers and takes {SLOW_MIB_PER_S:g} MiB/s in total, to all processes together. The limit is a preloaded
library, which holds for all set-ups alike. An update takes {UPDATE_S:g} s. Every restored value is compared with what
it must be.
  goodput   the updates that could be restored in the end, times the duration of an update, divided by all the time
  lost      updates that were done and had to be repeated, or were missing in the end
  restore   mean seconds from the call until the values are there and compared, and how many there were
  start     mean seconds from the start of the processes until that call
  saves     steps that were committed to each tier
  slow tier MiB that all processes together have written to it and read from it
Set-ups that have only the slow tier save whenever the last save is committed: a save costs the loop so little that the
interval of Young and Daly is shorter than a save takes. The others save to the fast tier each {FAST_STEPS} updates, and
to the slow one each {SLOW_STEPS}. The state is cut over the hosts. Orbax's emergency manager restores a lost host only
from another copy of the whole state: there the hosts hold {REPLICAS[EMERGENCY]} copies, so they compute as much more in
an update, and the first copy is saved to the slow tier only. What a lost host has left of newer steps is deleted
there before training continues, because this manager refuses to save a step again."""


@dataclasses.dataclass(frozen=True)
class Life:
    """How long the job lives, and which host is lost then; None: the time is over."""

    seconds: float
    lost: int | None


@dataclasses.dataclass
class Run:
    """A set-up under way.

    Attributes:
        facts: of its attempts.
        saves: committed steps by tier.
        passed: bytes read from the slow tier, and written to it.
        final: the update that could be restored in the end.
        failed: why it was given up.
    """

    facts: list[Facts] = dataclasses.field(default_factory=list)
    saves: dict[str, int] = dataclasses.field(default_factory=lambda: {"fast": 0, "slow": 0})
    passed: tuple[int, int] = (0, 0)
    final: int | None = None
    failed: str | None = None


def lives(seed: int, seconds: float, kills: int) -> list[Life]:
    """Kills at random moments of a run, each with a random host, and the rest of the time."""
    draw = random.Random(seed)
    moments = [0.0, *sorted(draw.uniform(0, seconds) for _ in range(kills)), seconds]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return [*(Life(gap, draw.randrange(HOSTS)) for gap in gaps[:-1]), Life(gaps[-1], None)]


def committed(folder: Path) -> set[str]:
    """The names of the committed steps of either library below a folder."""
    found = set[str]()
    for path, folders, files in os.walk(folder):
        if "COMMIT" in files and not os.path.basename(path).startswith("."):  # else it is not published yet
            found.add(os.path.basename(path))
        found.update(name for name in folders if name.isdigit())
        folders[:] = [] if "COMMIT" in files else [name for name in folders if not name.isdigit()]
    return found


class Benchmark:
    """All set-ups, in turn.

    Args:
        options: of the command.
        directory: for the slow tier and the logs.
        fast: for the fast tier.
        disk: the slow tier.
    """

    def __init__(self, options: argparse.Namespace, directory: Path, fast: Path, disk: SlowDisk) -> None:
        self._options, self._directory, self._fast, self._disk = options, directory, fast, disk
        self._numbers = itertools.count()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self.runs = {name: Run() for name in options.subjects}
        warm = self._context.Process(target=time.sleep, args=(0,))  # once it runs, the server has imported everything
        warm.start()
        warm.join()

    def run(self) -> None:
        """One attempt of each set-up after another until the time of all is over."""
        for number, life in enumerate(lives(self._options.seed, self._options.seconds, self._options.kills)):
            names = [name for name, run in self.runs.items() if run.failed is None]
            shift = number % max(1, len(names))
            for name in [*names[shift:], *names[:shift]]:
                try:
                    self._turn(name, life)
                except AttemptFailedError as error:
                    self.runs[name].failed = str(error)
                    cost_command.progress.print(f"{name}: given up: {error}", markup=False)

    def _turn(self, name: str, life: Life) -> None:
        run = self.runs[name]
        before = self._disk.passed()
        facts = facts_of(self._attempt(name, life), is_scheduled=life.lost is not None)
        run.facts.append(facts)
        run.passed = tuple(  # type: ignore[assignment]
            total + after - then for total, then, after in zip(run.passed, before, self._disk.passed(), strict=True)
        )
        reached = "did not begin" if facts.restored is None else f"updates {facts.restored} to {facts.last}"
        cost_command.progress.print(f"{name}: {facts.wall_s:.1f} s, {reached}", markup=False)
        if life.lost is not None:
            cost_command.remove(self._fast / name / f"host{life.lost}")
        else:
            run.final = self._attempt(name, None).record.restored or 0
            cost_command.progress.print(f"{name}: update {run.final} could be restored", markup=False)

    def _attempt(self, name: str, life: Life | None) -> Attempt:
        """Start the job and kill it; None: it restores, does one update, and ends."""
        slow, fast = self._disk.folder / name, self._fast / name
        slow.mkdir(exist_ok=True)
        log = self._directory / f"attempt-{next(self._numbers)}.log"
        given = Given(
            subject=name,
            slow=str(slow),
            fast=str(fast),
            log=str(log),
            cache=str(self._directory / "cache"),
            mib=self._options.mib,
            update_s=UPDATE_S,
            fast_steps=self._options.fast_steps,
            slow_steps=SLOW_STEPS,
            address=free_address(),
            processes=HOSTS,
            most_updates=None if life else 1,
        )
        began_at = time.monotonic()
        processes = [self._context.Process(target=train, args=(given, number)) for number in range(HOSTS)]
        for process in processes:
            process.start()
        try:
            self._watch(name, log, processes, began_at, life)
        finally:
            for process in sorted(processes, key=lambda each: life is None or each is not processes[life.lost or 0]):
                process.kill()
            for process in processes:
                process.join()
        ended_at = time.monotonic()
        return Attempt(began_at, ended_at, ended_at, False, processes[0].exitcode or 0, read(log))

    def _watch(
        self, name: str, log: Path, processes: Sequence[BaseProcess], began_at: float, life: Life | None
    ) -> None:
        """Count the saves until the job has to be killed, or has ended if it ends by itself."""
        folders = {"slow": self._disk.folder / name, "fast": self._fast / name}
        seen = {tier: committed(folder) for tier, folder in folders.items()}
        known = {tier: len(names) for tier, names in seen.items()}
        until = began_at + (life.seconds if life else LONGEST_S)
        while (now := time.monotonic()) < until:
            for tier, folder in folders.items():
                seen[tier] |= committed(folder)
            codes = [process.exitcode for process in processes]
            if life is None and codes == [0] * HOSTS:
                break
            for number, code in enumerate(codes):
                if code is not None and (code or life):
                    output = Path(f"{log}.{number}")
                    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
                    raise AttemptFailedError(f"process {number} left with {code}:\n{text[-SHOWN_CHARACTERS:]}")
            time.sleep(min(POLL_S, until - now))
        else:
            if life is None:
                raise AttemptFailedError(f"nothing was restored in {LONGEST_S:g} s")
        for tier, names in seen.items():
            self.runs[name].saves[tier] += len(names) - known[tier]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the set-ups in turn, print the table, and write the figures as JSON and as a page if asked."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    with cost_command.working_directory(options.dir) as directory, _fast_folder(options.fast_dir) as fast:
        machine = cost_command.machine_of(directory)
        disk = slow_disk(directory, SLOW_MIB_PER_S * MIB)
        with _variables({"LD_PRELOAD": str(disk.library), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}):
            benchmark = Benchmark(options, directory, fast, disk)
            benchmark.run()
    command = shlex.join(["python", "-m", "benchmarks.fast_tier_goodput", *given])
    results = {"command": command, **results_of(benchmark, options)}
    cost_command.finish(options, machine, results)
    show(cost_command.stdout_console(), machine, results)
    if options.page:
        write(options.page, machine, results)
    if results["failed"] or results["too_fast"]:
        raise SystemExit(1)


@contextlib.contextmanager
def _fast_folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fast-tier-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def results_of(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as JSON holds them."""
    found: dict[str, Any] = {"seconds": options.seconds, "seed": options.seed, "mib": options.mib}
    found |= {"kills": options.kills, "fast_steps": options.fast_steps, "runs": {}, "failed": {}, "too_fast": []}
    for name, run in benchmark.runs.items():
        if run.failed is not None or run.final is None:
            found["failed"][name] = run.failed
            continue
        restores = [one.restored_s - one.made_s for one in run.facts if one.restored and one.restored_s and one.made_s]
        starts = [one.made_s for one in run.facts if one.made_s]
        found["runs"][name] = {
            "goodput": dataclasses.asdict(goodput_of(run.facts, run.final, UPDATE_S)),
            "restore_s": statistics.mean(restores) if restores else None,
            "restores": len(restores),
            "start_s": statistics.mean(starts) if starts else None,
            "saves": run.saves,
            "passed": run.passed,
            "attempts": [dataclasses.asdict(one) for one in run.facts],
        }
        if run.passed[1] < run.saves["slow"] * options.mib * MIB:
            found["too_fast"].append(name)  # it writes by calls that the limit does not know
    return found


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """One row for each set-up."""
    rows: list[tuple[str, ...]] = []
    for name, run in results["runs"].items():
        found, saves, (bytes_read, bytes_written) = as_goodput(run["goodput"]), run["saves"], run["passed"]
        restore = "" if run["restore_s"] is None else f"{run['restore_s']:.2f} s ({run['restores']})"
        start = "" if run["start_s"] is None else f"{run['start_s']:.2f} s"
        figures = (f"{found.share:.1%}", f"{found.useful:,}", f"{found.done - found.useful:,}", restore, start)
        traffic = f"{bytes_written / MIB:,.0f} / {bytes_read / MIB:,.0f}"
        rows.append((name, *figures, str(saves["fast"]), str(saves["slow"]), traffic))
    title = f"{results['mib']} MiB on {HOSTS} hosts, {results['seconds']:g} s of each set-up"
    title += f" with {results['kills']} kills, seed {results['seed']}"
    headings = "set-up, goodput, useful updates, lost, restore, start, fast saves, slow saves, slow tier"
    return [TextTable(title, tuple(headings.split(", ")), rows)]


def _remarks(results: Mapping[str, Any]) -> list[str]:
    lines = ["restored values: all compared, none wrong"] if not results["failed"] else []
    lines += [f"failed: {name}: {(why or 'not ended').splitlines()[-1]}" for name, why in results["failed"].items()]
    return lines + [f"NOT LIMITED: {name} wrote faster than the slow tier allows" for name in results["too_fast"]]


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, _remarks(results))


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Goodput with a fast tier", "", "Written by `python -m benchmarks.fast_tier_goodput`.", ""]
    lines += [f"- {line}" for line in [*cost_command.machine_lines(dict(machine)), *_remarks(results)]]
    lines += ["", "```", results["command"], "```", *figure_lines(tables(results), HOW_TO_READ)]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = cost_command.parser("fast_tier_goodput", __doc__ or "")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("--seconds", type=float, help=f"of each set-up; default {SECONDS:g}")
    parser.add_argument("--kills", type=int, help=f"default {KILLS}")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--mib", type=int, default=STATE_MIB, help="size of the state")
    parser.add_argument("--fast-steps", type=int, default=FAST_STEPS, help="updates between saves to the fast tier")
    parser.add_argument("--fast-dir", type=Path, default=Path("/dev/shm"), help="where the fast tier is")
    parser.add_argument("--page", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    if options.kills is None:
        options.kills = QUICK_KILLS if options.quick else KILLS
    return options


report = report_command("fast_tier_goodput", __doc__, PAGE, show, write)

if __name__ == "__main__":
    main()
