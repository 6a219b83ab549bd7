"""The plot of a budget on a disk that changes its speed: how far saves lie apart, what they cost, over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.overhead_summary import intervals_of

COLOURS = {"interval": "#1b6ca8", "lasted": "#d9822b", "slow": "#f3d9c2", "budget": "#9a9a9a"}
DPI = 110


def write(file: Path, phases: Mapping[str, Any], fraction: float) -> None:
    """Write it as PNG.

    Args:
        file: where to.
        phases: as `phases_in_child` returns them.
        fraction: the budget.

    Raises:
        ImportError: matplotlib is missing; it comes with the `bench` extra.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    saves = phases["saves"]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9.0, 5.0), layout="constrained")
    begins, lasted = [save["at_s"] for save in saves], [save["lasted_s"] for save in saves]
    above.plot(
        begins[1:], intervals_of(saves), "o-", color=COLOURS["interval"], markersize=3, label="since the save before"
    )
    known = [(at, seconds) for at, seconds in zip(begins, lasted, strict=True) if seconds is not None]
    above.plot([at for at, _ in known], [s for _, s in known], ".", color=COLOURS["lasted"], label="a save lasted")
    above.set_ylabel("seconds", fontsize=8)
    below.plot(
        begins, [100 * save["spent"] for save in saves], "-", color=COLOURS["interval"], label="by the policy, so far"
    )
    below.axhline(100 * fraction, color=COLOURS["budget"], linestyle="--", label="budget")
    below.set_ylabel("slowed down, per cent", fontsize=8)
    below.set_xlabel("seconds of training", fontsize=8)
    for axes in (above, below):
        _mark(axes, phases)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, loc="upper left" if axes is above else "lower right")
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _mark(axes: Any, phases: Mapping[str, Any]) -> None:
    """Where the disk is slow."""
    for number, rate in enumerate(phases["rates"]):
        if rate is not None:
            label = f"disk limited to {rate / 2**20:g} MiB/s"
            axes.axvspan(phases["ends_s"][number], phases["ends_s"][number + 1], color=COLOURS["slow"], label=label)
