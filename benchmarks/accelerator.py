"""Compares saves and loads on an accelerator with Orbax and the raw limits: `python -m benchmarks.accelerator`."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cost_command, figure_page
from benchmarks.cells import TextTable
from benchmarks.cost_process import run_fresh
from benchmarks.spread import Spread
from benchmarks.step_time_model import Size
from benchmarks.step_time_subjects import ORBAX_V0, ORBAX_V1, OURS, OURS_DEVICE, OURS_HOST, OURS_STREAM

SUBJECTS = (OURS, OURS_HOST, OURS_DEVICE, OURS_STREAM, ORBAX_V0, ORBAX_V1)
LARGE, SMALL = Size(layers=2, width=2048, batch=8, window=512), Size(layers=1, width=64, batch=2, window=16)
SAVES, QUICK_SAVES = 5, 1
STEPS, QUICK_STEPS = 10, 3
KEPT_SAVES, QUICK_KEPT_SAVES = 50, 2
LIMIT_S = 330.0
"""For all measuring processes together: what is left of six minutes once packages are installed."""
SHARE = 2 / 3
"""Of a subject's time, for its measurements: the rest is for its start and its compilations."""
MIB = 1 << 20
PAGE = "accelerator.md"

HOW_TO_READ = """\
Median, and below it min .. max. The state is donated in each step. Each row is a process of its own.
  pinned copy     the same arrays by jax.device_put to pinned memory of the host, and back
  disk            one file of as many bytes by plain calls: two threads, past the page cache, synced
  call            how long the call that saves holds up the loop, while the training runs
  during / quiet  median step that began while a save was under way / median quiet step of the same process
  save            from the call until the library calls it finished, while the training runs
  durable         the same alone, and until all files and directories are synced
  load            onto the device, page cache dropped, until all arrays are there
  first step      the step after a load / median quiet step
  memory          the peak above what the training alone needs: of the host, and of the device where it says"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for; print the tables, and write all samples and the page if asked."""
    options = _parse(arguments)
    size = _size(options)
    began = time.monotonic()
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        ask = _Asker(options, directory)
        found: dict[str, Any] = {"size": dataclasses.asdict(size), "turns": {}, "failed": {}}
        found["raw"] = ask("raw_limits", size=found["size"], directory=str(directory), repeats=options.saves)
        found["device"] = found["raw"].pop("device")
        found["kept"] = ask("kept_bytes", directory=str(directory), saves=options.kept_saves)
        for number, name in enumerate(options.subjects):
            left_s = max(0.0, options.limit_s - (time.monotonic() - began)) / (len(options.subjects) - number)
            more = {"saves": options.saves, "steps": options.steps, "limit_s": left_s * SHARE}
            try:
                found["turns"][name] = ask("turn", subject=name, size=found["size"], directory=str(directory), **more)
            except RuntimeError as error:
                found["failed"][name] = str(error)
    found["took_s"] = time.monotonic() - began
    console = cost_command.stdout_console()
    figure_page.show_figures(console, machine, tables(found), HOW_TO_READ, remarks(found))
    cost_command.finish(options, machine, found)
    if options.page is not None:
        write_page(options.page, machine, found)
    if found["failed"] or any(found["kept"].values()):
        raise SystemExit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("accelerator", __doc__ or "")
    parser.add_argument("--subjects", type=cost_command.names, default=SUBJECTS, help=f"of {','.join(SUBJECTS)}")
    parser.add_argument("--platform", help="the platform that JAX uses; by default it chooses")
    parser.add_argument("--layers", type=int, help="of the model; each of the default width is 576 MiB of state")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("--saves", type=int, help=f"counted, of each sort; default {SAVES}, with --quick {QUICK_SAVES}")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="begin no save later; default %(default)s")
    parser.add_argument("--page", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.subjects) - set(SUBJECTS))
    if unknown or not options.subjects:
        parser.error(f"--subjects: expected some of {', '.join(SUBJECTS)}, found {', '.join(unknown) or 'none'}")
    options.saves = options.saves or (QUICK_SAVES if options.quick else SAVES)
    options.steps = QUICK_STEPS if options.quick else STEPS
    options.kept_saves = QUICK_KEPT_SAVES if options.quick else KEPT_SAVES
    if options.saves < 1:
        parser.error("--saves: expected at least 1")
    return options


def _size(options: argparse.Namespace) -> Size:
    size = SMALL if options.quick else LARGE
    return dataclasses.replace(size, layers=options.layers or size.layers, width=options.width or size.width)


class _Asker:
    """Calls functions of `benchmarks.accelerator_turn` in processes of their own, which share what they compile."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options, self._directory = options, directory

    def __call__(self, function: str, **given: Any) -> Any:
        began = time.monotonic()
        answer = run_fresh(
            f"benchmarks.accelerator_turn:{function}",
            given,
            platform=self._options.platform,
            cache=self._directory / "compiled",
            under=self._options.under,
        )
        name = given.get("subject", function)
        cost_command.progress.print(f"{name}: {time.monotonic() - began:.1f} s")
        return answer


def tables(found: Mapping[str, Any]) -> list[TextTable]:
    """The raw limits, and what each library does."""
    raw, nbytes = found["raw"], found["raw"]["state_bytes"]
    limits = TextTable(
        f"raw limits, of {nbytes / MIB:.0f} MiB on {found['device']['kind']}",
        ("", "seconds", "GiB/s"),
        [
            (name, _spread(raw[key], 1, 3), _spread([nbytes / 2**30 / second for second in raw[key]], 1, 2))
            for name, key in (
                (f"pinned copy to the host ({raw['memory_kind']})", "to_host"),
                ("pinned copy to the device", "to_device"),
                ("disk, write and sync", "write"),
                ("disk, read", "read"),
            )
        ],
    )
    headings = "call ms, call / pinned copy, during / quiet, save s, durable s, durable / disk, load s, load / limit"
    headings += ", first step, host MiB, device MiB"
    rows = [(name, *_cells(turn, raw)) for name, turn in found["turns"].items()]
    return [limits, TextTable("saves and loads", ("library", *headings.split(", ")), rows)]


def _cells(turn: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    ratios, quiet_s = _ratios(turn, raw), statistics.median(turn["quiet_s"])
    device = turn["device_peak_bytes"]
    return [
        _spread(turn["blocking_s"], 1e3, 1),
        f"{ratios['call']:.2f}",
        f"{ratios['step']:.2f}",
        _spread(turn["save_s"], 1, 2),
        _spread([each["durable_s"] for each in turn["alone"]], 1, 2),
        f"{ratios['durable']:.2f}",
        _spread([each["load_s"] for each in turn["loads"]], 1, 2),
        f"{ratios['load']:.2f}",
        _spread([each["first_step_s"] / quiet_s for each in turn["loads"]], 1, 2),
        f"{turn['host_peak_bytes'] / MIB:.0f}",
        "" if device is None else f"{device / MIB:.0f}",
    ]


def _ratios(turn: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, float]:
    """Ratios of medians: the call to a pinned copy, a step during a save to a quiet one, times to the raw limits."""
    middle = statistics.median
    loaded_s = middle([each["load_s"] for each in turn["loads"]])
    return {
        "call": middle(turn["blocking_s"]) / middle(raw["to_host"]),
        "step": middle(turn["during_s"]) / middle(turn["quiet_s"]),
        "durable": middle([each["durable_s"] for each in turn["alone"]]) / middle(raw["write"]),
        "load": loaded_s / max(middle(raw["read"]), middle(raw["to_device"])),
    }


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    found = Spread.of([value * scale for value in values])
    ends = f"{found.minimum:.{digits}f} .. {found.maximum:.{digits}f}"
    return f"{found.median:.{digits}f}\n{ends}" if len(values) > 1 else f"{found.median:.{digits}f}"


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Whether the bytes were kept, what failed, and which targets are met on an accelerator."""
    lines = [
        f"bytes after donation, snapshot={mode!r}: {problem or 'equal'}" for mode, problem in found["kept"].items()
    ]
    lines += [f"failed: {name}: {problem.splitlines()[-1]}" for name, problem in found["failed"].items()]
    lines.append(f"all of it took {found['took_s']:.0f} s")
    if found["device"]["platform"] == "cpu":
        return [*lines, "this is no accelerator: the figures show that the benchmark runs, and nothing else"]
    return [*lines, *_damage_reports(found)]


def _damage_reports(found: Mapping[str, Any]) -> list[str]:
    ratios = {name: _ratios(turn, found["raw"]) for name, turn in found["turns"].items()}
    lines = []
    if OURS_HOST in ratios:
        lines.append(_verdict("host: call / pinned copy", ratios[OURS_HOST]["call"], 1.3))
    if OURS_DEVICE in ratios:
        call_s = statistics.median(found["turns"][OURS_DEVICE]["blocking_s"])
        lines.append(_verdict("device: call, ms", call_s * 1e3, 10.0))
    for name in (each for each in ratios if each in (OURS, OURS_HOST, OURS_DEVICE, OURS_STREAM)):
        lines.append(_verdict(f"{name}: step during a save / quiet step", ratios[name]["step"], 1.1))
        lines.append(_verdict(f"{name}: load / slower of disk and copy", ratios[name]["load"], 1 / 0.8))
    return lines


def _verdict(name: str, value: float, most: float) -> str:
    return f"target {'met' if value <= most else 'missed'}: {name}: {value:.2f}, at most {most:.2f}"


def write_page(folder: Path, machine: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """The figures as a page for people."""
    size = ", ".join(f"{name} {value}" for name, value in found["size"].items())
    lines = [
        f"# Accelerator: {found['device']['kind']}",
        "",
        "Written by `python -m benchmarks.accelerator`; `benchmarks/README.md` says how to run it.",
        "",
        *(f"- {line}" for line in cost_command.machine_lines(dict(machine))),
        f"- JAX {found['device']['jax']} on {found['device']['platform']}; model: {size}",
        *figure_page.figure_lines(tables(found), HOW_TO_READ),
        *(f"- {line}" for line in remarks(found)),
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
