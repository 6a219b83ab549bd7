"""Plots of a record: times of saves and of loads as ratios to ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import Record
from benchmarks.registry import OURS
from benchmarks.spread import Spread
from benchmarks.summary import Figures, Summary, summarise
from benchmarks.workloads import WHOLE

COLUMNS = 3
PANEL_INCHES = 4.6
ROW_INCHES = 0.24
DPI = 110
NARROW_RANGE = 60  # largest by smallest
COLOURS = {"ours": "#1b6ca8", "limit": "#9a9a9a", "peer": "#d9822b"}
LIMITS = ("raw", "raw_fresh", "memcpy")

Bars = dict[str, Spread]


def write(record: Record, folder: Path) -> list[Path]:
    """Write `save.png` and `load.png` to `folder`, which has to be there.

    Returns:
        The files; none where no workload has both ours and another.

    Raises:
        ImportError: matplotlib is missing; it comes with the `bench` extra.
    """
    summaries = {name: summarise(workload.turns) for name, workload in record.workloads.items()}
    kinds = {
        "save": ("durable save: time / ours", _save_panels(summaries)),
        "load": ("load: time / ours", _load_panels(summaries)),
    }
    written = []
    for name, (title, panels) in kinds.items():
        if panels:
            file = folder / f"{name}.png"
            _draw(file, title, panels, _caption(record))
            written.append(file)
    return written


def _save_panels(summaries: Mapping[str, Summary]) -> dict[str, Bars]:
    panels = {name: _bars(summary.saves, "durable_by_ours") for name, summary in summaries.items()}
    return {name: bars for name, bars in panels.items() if len(bars) > 1}


def _load_panels(summaries: Mapping[str, Summary]) -> dict[str, Bars]:
    panels = {}
    for name, summary in summaries.items():
        for target, rows in summary.loads.items():
            bars = _bars(rows, "load_by_ours")
            if len(bars) > 1:
                panels[name if target == WHOLE else f"{name}: {target}"] = bars
    return panels


def _bars(rows: Mapping[str, Figures], figure: str) -> Bars:
    bars = {row: spread for row, figures in rows.items() if (spread := figures[figure])}
    return bars | {OURS: Spread(1.0, 1.0, 1.0)} if OURS in rows else {}


def _draw(file: Path, title: str, panels: Mapping[str, Bars], caption: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(len(bars) for bars in panels.values())
    size = (columns * PANEL_INCHES, lines * (tallest * ROW_INCHES + 1.0) + 0.9)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, (name, bars) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, name, bars)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title} (log scale; above 1 ours is faster; whiskers: smallest and largest round)", fontsize=11)
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _draw_panel(axes: Any, name: str, bars: Bars) -> None:
    rows = sorted(bars, key=lambda row: bars[row].median, reverse=True)
    medians = [bars[row].median for row in rows]
    below = [bars[row].median - bars[row].minimum for row in rows]
    above = [bars[row].maximum - bars[row].median for row in rows]
    colours = [COLOURS["ours" if row == OURS else "limit" if row in LIMITS else "peer"] for row in rows]
    # Bars from 1 on: to the right what is slower than ours, to the left what is faster.
    axes.barh(rows, [median - 1 for median in medians], left=1, color=colours, height=0.7)
    axes.errorbar(medians, rows, xerr=[below, above], fmt="o", color="black", markersize=2, capsize=2, linewidth=0.8)
    _logarithmic(axes, min(medians[-1] - below[-1], 1), max(medians[0] + above[0], 1))
    axes.axvline(1, color="black", linewidth=0.8)
    for row, median in zip(rows, medians, strict=True):
        text = f"{median:.2g}" if median < 99.5 else f"{median:.0f}"
        axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axes.set_title(name, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(axis="x", linewidth=0.3)


def _logarithmic(axes: Any, least: float, most: float) -> None:
    """A logarithmic axis whose ticks are plain numbers: a few for each decade if it has few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    steps = (1.0, 2.0, 5.0) if most / least < NARROW_RANGE else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _caption(record: Record) -> str:
    machine, versions = record.machine, record.versions
    processors = " and ".join(dict.fromkeys(str(one["processor"]) for one, _ in record.machines))
    gib = int(machine["memory_bytes"] or 0) / (1 << 30)
    shown = ("python", "jax", "jaxckpt-train", "orbax-checkpoint", "safetensors", "flax", "torch", "torchsnapshot")
    listed = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    return f"{machine['cores']} cores ({processors}), {gib:.0f} GiB, {machine['file_system']}\n{listed}"
