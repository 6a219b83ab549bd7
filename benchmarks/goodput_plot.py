"""The plot of goodput: where the time of each subject went."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.goodput_summary import Goodput, Where

USEFUL = "useful updates"
COLOURS = {
    "start": "#9a9a9a",
    "restore": "#6a4c93",
    "lost": "#c0392b",
    "called": "#d9822b",
    "slower": "#e8c547",
    "leaving": "#4a7c59",
}
LABELS = tuple(COLOURS)
USEFUL_COLOUR = "#1b6ca8"
ROW_INCHES, DPI = 0.45, 110


def without_use(where: Where) -> dict[str, float]:
    """Seconds that went elsewhere, by label."""
    return {
        "start": where.starting,
        "restore": where.restoring,
        "lost": where.lost,
        "called": where.called,
        "slower": where.slower,
        "leaving": where.leaving,
    }


def write(file: Path, goodput: Mapping[str, Goodput]) -> None:
    """Write it as PNG.

    Raises:
        ImportError: matplotlib is missing; it comes with the `bench` extra.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9.0, 1.6 + ROW_INCHES * len(goodput)), layout="constrained")
    names = list(goodput)[::-1]
    reached = dict.fromkeys(names, 0.0)
    for label in (USEFUL, *LABELS):
        parts = [_part(goodput[name], label) for name in names]
        colour = USEFUL_COLOUR if label == USEFUL else COLOURS[label]
        axes.barh(names, parts, left=[reached[name] for name in names], color=colour, label=label, height=0.7)
        reached = {name: reached[name] + part for name, part in zip(names, parts, strict=True)}
    for name in names:
        axes.annotate(f"{goodput[name].share:.1%}", (0.5, name), color="white", fontsize=8, va="center")
    axes.set_xlabel("per cent of the time of all its processes", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_xlim(0, 100)
    figure.legend(loc="outside upper center", ncols=len(LABELS) + 1, fontsize=8, frameon=False)
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _part(one: Goodput, label: str) -> float:
    """In per cent. Updates may be faster than those of the undisturbed loop; what is below 0 then is not drawn."""
    seconds = one.where.useful if label == USEFUL else without_use(one.where)[label]
    return max(0.0, 100 * seconds / one.wall_s)
