"""The time of training steps while a checkpoint is saved in the background: `python -m benchmarks.step_time`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cost_command
from benchmarks.cost_process import run_fresh
from benchmarks.spread import Spread
from benchmarks.step_time_model import FULL, QUICK, Size
from benchmarks.step_time_subjects import NOTHING, ORBAX_V0, ORBAX_V1, OURS, OURS_HOST
from benchmarks.step_time_summary import TARGET_RATIO, Summary, Turn, summarise
from benchmarks.step_time_turn import Cycle

SUBJECTS = (NOTHING, OURS, OURS_HOST, ORBAX_V0, ORBAX_V1)
ROUNDS, QUICK_ROUNDS = 5, 2
SAVES, QUICK_SAVES = 4, 2
STEPS = 8

HOW_TO_READ = """\
Median and, below it, min .. max: over the rounds; lost, call and save over all saves. Ratios are to quiet steps of
the same process.
  during / quiet  median step that began while a save was under way / median quiet step of the same round
  first / quiet   the same, only the first step after the call
  p90             90th percentile during saves / of quiet steps, all rounds together
  slowdown        wall time of a step in blocks of at least {steps} steps with one save and its call / in quiet blocks
  lost            what one save costs the loop: wall time of its block, less as many quiet steps
  nothing         the control: a save of one second that does nothing. What it shows is noise"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print the table to stdout, and write all samples as JSON if asked."""
    options = _parse(arguments)
    turns: dict[str, list[Turn]] = {name: [] for name in options.subjects}
    state_bytes = 0
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        for number in range(options.rounds):
            for name in _turn_order(options.subjects, number):
                answer = _take_turn(options, name, directory)
                state_bytes = answer["state_bytes"]
                turns[name].append([Cycle(**cycle) for cycle in answer["cycles"]])
                _report(number, name, turns[name][-1])
    summaries = {name: summarise(taken) for name, taken in turns.items()}
    console = cost_command.stdout_console()
    cost_command.show_machine(console, machine)
    show(console, summaries, state_bytes, options.rounds)
    results = {
        "state_bytes": state_bytes,
        "summary": {name: dataclasses.asdict(summary) for name, summary in summaries.items()},
        "turns": {name: [[dataclasses.asdict(c) for c in turn] for turn in taken] for name, taken in turns.items()},
    }
    cost_command.finish(options, machine, results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("step_time", __doc__ or "")
    parser.add_argument("--subjects", type=cost_command.names, default=SUBJECTS, help=f"of {','.join(SUBJECTS)}")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}, with --quick {QUICK_ROUNDS}")
    parser.add_argument("--saves", type=int, help=f"in one turn; default {SAVES}, with --quick {QUICK_SAVES}")
    parser.add_argument("--layers", type=int, help="of the model, else a size for a result, or for --quick")
    parser.add_argument("--width", type=int, help="of the model")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.subjects) - set(SUBJECTS))
    if unknown or not options.subjects:
        parser.error(f"--subjects: expected some of {', '.join(SUBJECTS)}, found {', '.join(unknown) or 'none'}")
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.saves = options.saves or (QUICK_SAVES if options.quick else SAVES)
    if min(options.rounds, options.saves) < 1:
        parser.error("--rounds, --saves: expected at least 1")
    return options


def _size(options: argparse.Namespace) -> Size:
    size = QUICK if options.quick else FULL
    return dataclasses.replace(size, layers=options.layers or size.layers, width=options.width or size.width)


def _take_turn(options: argparse.Namespace, name: str, directory: Path) -> Any:
    arguments = {
        "subject": name,
        "size": dataclasses.asdict(_size(options)),
        "directory": str(directory),
        "saves": options.saves,
        "steps": STEPS,
    }
    return run_fresh("benchmarks.step_time_turn:turn_in_child", arguments, under=options.under)


def _turn_order(names: Sequence[str], number: int) -> list[str]:
    """Another subject begins in every round, and every other round runs backwards: none has a fixed forerunner."""
    turned = [names[(number + index) % len(names)] for index in range(len(names))]
    return turned[::-1] if number % 2 else turned


def _report(number: int, name: str, turn: Turn) -> None:
    one = summarise([turn])
    cost_command.progress.print(
        f"round {number + 1} {name}: quiet {one.quiet_s.median:.3f} s, during {one.during_s.median:.3f} s "
        f"({one.ratio.median:.2f}x), call {one.blocking_s.median * 1e3:.0f} ms, save {one.save_s.median:.2f} s"
    )


def show(console: Console, summaries: dict[str, Summary], state_bytes: int, rounds: int) -> None:
    """The table of all subjects, how to read it, and whether ours meets its targets."""
    table = Table(
        title=f"steps during a save (state {state_bytes / 2**20:.0f} MiB, {rounds} rounds)",
        title_justify="left",
        show_lines=True,
    )
    headings = "quiet ms, during ms, during / quiet, first / quiet, p90 ms, slowdown, lost ms, call ms, save ms"
    for heading in ("subject", *headings.split(", ")):
        table.add_column(heading, justify="left" if heading == "subject" else "right")
    for name, one in summaries.items():
        tail = f"{one.tail_ratio:.2f}x\n{one.during_tail_s * 1e3:.0f} / {one.quiet_tail_s * 1e3:.0f}"
        steps = [_milliseconds(spread) for spread in (one.quiet_s, one.during_s)]
        save = [_milliseconds(spread) for spread in (one.lost_s, one.blocking_s, one.save_s)]
        table.add_row(name, *steps, _times(one.ratio), _times(one.first_ratio), tail, _times(one.slowdown), *save)
    console.print(table)
    console.print(HOW_TO_READ.format(steps=STEPS), soft_wrap=True)
    for line in verdicts(summaries):
        console.print(line, markup=False)


def verdicts(summaries: dict[str, Summary]) -> list[str]:
    """Whether ours meets its targets: a step at most a tenth slower, and less disturbed than by any other library."""
    lines = []
    for name in (OURS, OURS_HOST):
        if name in summaries:
            lines += [f"{name}: {line}" for line in _verdicts_of(summaries[name], summaries)]
    return lines


def _verdicts_of(ours: Summary, summaries: dict[str, Summary]) -> list[str]:
    found = f"target {TARGET_RATIO:.2f}x at the median: {'met' if ours.within_target else 'MISSED'}"
    lines = [f"{found}, {ours.ratio.median:.2f}x"]
    for name, other in summaries.items():
        if name not in (OURS, OURS_HOST, NOTHING):
            met = "met" if ours.ratio.median < other.ratio.median else "MISSED"
            lines.append(f"better than {name}: {met}, {ours.ratio.median:.2f}x against {other.ratio.median:.2f}x")
            less = "yes" if ours.lost_s.median < other.lost_s.median else "NO"
            lost = f"{ours.lost_s.median * 1e3:.0f} ms against {other.lost_s.median * 1e3:.0f} ms"
            lines.append(f"a save costs the loop less than one of {name}: {less}, {lost}")
    return lines


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.0f}\n{spread.minimum * 1e3:.0f} .. {spread.maximum * 1e3:.0f}"


def _times(spread: Spread) -> str:
    return f"{spread.median:.2f}x\n{spread.minimum:.2f} .. {spread.maximum:.2f}"


if __name__ == "__main__":
    main()
