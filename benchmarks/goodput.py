"""A training that is killed again and again, kept by ours and by Orbax: `python -m benchmarks.goodput`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cost_command, goodput_report, page_cache
from benchmarks.goodput_attempt import Attempt, AttemptFailedError, run_attempt
from benchmarks.goodput_costs import SaveCost, cost_of, interval_for
from benchmarks.goodput_facts import Facts, facts_of, median_update_s, update_times
from benchmarks.goodput_kills import Kill, mtbf_s, schedule, within
from benchmarks.goodput_losses import Losses
from benchmarks.goodput_subjects import INTERVALS, NOTHING, SUBJECTS, Interval
from benchmarks.goodput_summary import goodput_of
from benchmarks.goodput_training import Arguments
from benchmarks.lm_training import FULL, QUICK

SECONDS, QUICK_SECONDS = 600.0, 20.0
MEAN_S, QUICK_MEAN_S = 24.0, 6.0
COST_SAVES, QUICK_COST_SAVES = 8, 2
COST_EVERY = 40  # updates
LONGEST_S = 600.0  # of a process that ends by itself
QUIET_UPDATES, QUICK_QUIET_UPDATES = 100, 20
SKIPPED = 10  # updates of a fresh process that say nothing of the others
LEAST_LEFT_S = 1.0  # of a budget, for one more attempt
LOOKED_AT = 1000  # ends of a schedule: more than any run has


@dataclasses.dataclass
class Run:
    """A subject under way.

    Attributes:
        left_s: of its time.
        facts: of its attempts.
        final: the update that could be restored in the end; None: nobody has looked yet.
        failed: why it was given up.
    """

    left_s: float
    facts: list[Facts] = dataclasses.field(default_factory=list)
    final: int | None = None
    failed: str | None = None


class Benchmark:
    """All subjects on one disk, in turn."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options, self._directory = options, directory
        self._numbers = itertools.count()
        ends = {"least_s": options.mean_s / 3, "mean_s": options.mean_s, "most_s": 3 * options.mean_s}
        self.kills = list(itertools.islice(schedule(options.seed, **ends), LOOKED_AT))
        self.runs = {name: Run(options.seconds) for name in options.subjects}
        self.costs: dict[str, SaveCost] = {}
        self.intervals: dict[str, Interval] = {}
        self.quiet: list[list[float]] = []
        self.losses = Losses()

    def measure_costs(self) -> None:
        """What a save of each library costs, which says how often to save those that do not know it themselves."""
        for name in dict.fromkeys(INTERVALS.get(name, name) for name in self.runs):
            given = Interval(COST_EVERY, 0.0)
            updates = (self._options.cost_saves + 2) * COST_EVERY  # the first one does not count
            attempt = self._attempt(name, given, None, LONGEST_S, most_updates=updates, folder=f"cost-{name}")
            self.losses.add(name, attempt)
            cost = self.costs[name] = cost_of(attempt.record, COST_EVERY, attempt.began_at)
            mean_s = mtbf_s(within(self.kills, self._options.seconds), cost.start_s)
            found = self.intervals[name] = interval_for(cost, mean_s)
            _say(
                f"a save of {name} costs {cost.cost_s * 1e3:.0f} ms ({cost.called_s * 1e3:.0f} ms of it the call), an "
                f"update takes {cost.update_s * 1e3:.0f} ms: every {found.steps} updates, {found.seconds:.1f} s"
            )
            cost_command.remove(self._directory / f"cost-{name}")

    def give_turns(self) -> Iterator[int]:
        """One attempt of each subject after the other until the time of all is over; the number of each such round."""
        for number, kill in enumerate(self.kills):
            under_way = [name for name, run in self.runs.items() if run.final is None and run.failed is None]
            if not under_way:
                return
            self._quiet_turn()
            for name in _turned(under_way, number):
                try:
                    self._turn(name, kill)
                except AttemptFailedError as error:
                    self.runs[name].failed = str(error)
                    _say(f"{name}: given up: {error}")
            yield number

    def _quiet_turn(self) -> None:
        updates = self._options.quiet_updates
        attempt = self._attempt(NOTHING, Interval(1, 1.0), None, LONGEST_S, most_updates=updates)
        self.losses.add(NOTHING, attempt)
        self.quiet.append(update_times(attempt, min(SKIPPED, updates // 2)))

    def _turn(self, name: str, kill: Kill) -> None:
        run = self.runs[name]
        interval = self._interval(name)
        attempt = self._attempt(name, interval, kill, run.left_s)
        self.losses.add(name, attempt)
        run.facts.append(facts_of(attempt, is_scheduled=kill.after_s < run.left_s))
        run.left_s -= attempt.wall_s
        _say(_line(name, kill, run))
        if run.left_s < LEAST_LEFT_S:
            self._look(name, run, interval)

    def _look(self, name: str, run: Run, interval: Interval) -> None:
        """What can be restored: a process restores it and does one more update, whose loss is compared."""
        attempt = self._attempt(name, interval, None, LONGEST_S, most_updates=1)
        self.losses.add(name, attempt)
        run.final = attempt.record.restored or 0
        cost_command.remove(self._directory / name)
        _say(f"{name}: update {run.final} could be restored")

    def _interval(self, name: str) -> Interval:
        every_s = self._options.every_s
        if every_s is None:
            return self.intervals[INTERVALS.get(name, name)]
        return Interval(max(1, round(every_s / self.update_s)), every_s)

    @property
    def update_s(self) -> float:
        """Seconds for an undisturbed update, as known so far."""
        return median_update_s(self.quiet).median

    def _attempt(
        self,
        name: str,
        interval: Interval,
        kill: Kill | None,
        left_s: float,
        *,
        most_updates: int | None = None,
        folder: str | None = None,
    ) -> Attempt:
        page_cache.settle()  # what the one before has left to the disk is not this one's
        given = Arguments(
            subject=name,
            directory=str(self._directory / (folder or name)),
            log=str(self._directory / f"attempt-{next(self._numbers)}.log"),
            cache=str(self._directory / "cache"),
            size=dict(QUICK if self._options.quick else FULL),
            interval_steps=interval.steps,
            interval_s=interval.seconds,
            most_updates=most_updates,
        )
        return run_attempt(given, kill, left_s, self._options.under)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print the tables, and write the figures as JSON and as a page if asked."""
    options = _parse(arguments)
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        benchmark = Benchmark(options, directory)
        if options.every_s is None:
            benchmark.measure_costs()
        if options.costs_only:
            return
        for _ in benchmark.give_turns():
            cost_command.finish(options, machine, results_of(benchmark, options))
    results = results_of(benchmark, options)
    goodput_report.show(cost_command.stdout_console(), machine, results)
    if options.page:
        goodput_report.write(options.page, machine, results)
    if results["failed"] or results["conflicts"]:
        raise SystemExit(1)


def results_of(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as JSON holds them."""
    update = median_update_s(benchmark.quiet)
    whole = {name: run for name, run in benchmark.runs.items() if run.final is not None}
    figures = {name: goodput_of(run.facts, run.final or 0, update.median) for name, run in whole.items()}
    return {
        "seconds": options.seconds,
        "seed": options.seed,
        "size": dict(QUICK if options.quick else FULL),
        "update_s": dataclasses.asdict(update),
        "costs": {name: dataclasses.asdict(cost) for name, cost in benchmark.costs.items()},
        "intervals": {name: dataclasses.asdict(found) for name, found in benchmark.intervals.items()},
        "goodput": {name: dataclasses.asdict(found) for name, found in figures.items()},
        "attempts": {name: [dataclasses.asdict(one) for one in run.facts] for name, run in benchmark.runs.items()},
        "failed": {name: run.failed for name, run in benchmark.runs.items() if run.failed},
        "compared": benchmark.losses.compared,
        "conflicts": benchmark.losses.conflicts,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("goodput", __doc__ or "")
    parser.add_argument("--subjects", type=cost_command.names, help=f"of {','.join(SUBJECTS)}; default the first ones")
    parser.add_argument("--seconds", type=float, help=f"of each subject; default {SECONDS:g}")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--mean-s", type=float, help=f"seconds between two kills; default {MEAN_S:g}")
    parser.add_argument(
        "--every-s",
        type=float,
        help="seconds between saves, for subjects that need an interval; by default from their cost",
    )
    parser.add_argument("--cost-saves", type=int, help=f"to find what they cost; default {COST_SAVES}")
    parser.add_argument("--costs-only", action="store_true", help="only find what saves cost")
    parser.add_argument("--page", type=Path, help="folder for goodput.md and goodput.png")
    options = parser.parse_args(arguments)
    options.subjects = options.subjects or [name for name, is_default in SUBJECTS.items() if is_default]
    unknown = sorted(set(options.subjects) - set(SUBJECTS))
    if unknown:
        parser.error(f"--subjects: expected some of {', '.join(SUBJECTS)}, found {', '.join(unknown)}")
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    options.mean_s = options.mean_s or (QUICK_MEAN_S if options.quick else MEAN_S)
    options.cost_saves = options.cost_saves or (QUICK_COST_SAVES if options.quick else COST_SAVES)
    options.quiet_updates = QUICK_QUIET_UPDATES if options.quick else QUIET_UPDATES
    return options


def _turned(names: Sequence[str], number: int) -> list[str]:
    """Another subject begins in every round, and every other round runs backwards: none has a fixed forerunner."""
    turned = [names[(number + index) % len(names)] for index in range(len(names))]
    return turned[::-1] if number % 2 else turned


def _line(name: str, kill: Kill, run: Run) -> str:
    one = run.facts[-1]
    how = f"asked to leave, {one.leaving_s:.1f} s" if one.asked else kill.signal.name if one.is_scheduled else "time up"
    reached = "did not begin" if one.restored is None else f"updates {one.restored} to {one.last or one.restored}"
    return f"{name}: {one.wall_s:.1f} s, {reached}, {how}; {max(0.0, run.left_s):.0f} s left"


def _say(text: str) -> None:
    cost_command.progress.print(text, markup=False)


if __name__ == "__main__":
    main()
