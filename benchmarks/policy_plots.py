"""Draws the plots of docs/reference/policies.md from what the real policies decide in simulated trainings.

`make docs-plots` runs `python -m benchmarks.policy_plots [FOLDER]`. Each file holds a digest of the data that it shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import policy_scenes as scenes
from benchmarks import tuned_scenes as tuned

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "plots"
SAVED, TEMPORARY, QUIET, LINK = "#1b6ca8", "#d9822b", "#c8c8c8", "#c0392b"
INCH_OF_LIVES, INCH_OF_STRIP = (4.4, 2.5), (7.0, 0.85)
# The same bytes each time, and texts that stay texts.
SETTINGS: dict[str, Any] = {"svg.hashsalt": "policies", "svg.fonttype": "none", "font.size": 8, "axes.linewidth": 0.6}
Drawing = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Plot:
    """One file: what is drawn, and how.

    Attributes:
        data: makes what is drawn, in plain lists and numbers.
        draw: draws it on a figure.
        inches: how wide and how high.
    """

    data: Callable[[], Any]
    draw: Drawing
    inches: tuple[float, float]


def plots() -> dict[str, Plot]:
    """All plots by the names of their files."""
    found = {}
    for name, policy in scenes.SAVE_POLICIES.items():
        asked_s = scenes.ASKED_S if name == "preemption" else None
        has_losses = "loss" in repr(policy)
        data = _data_of_saves(policy, asked_s, has_losses)
        found[name] = Plot(data, _draw_saves, (INCH_OF_STRIP[0], INCH_OF_STRIP[1] + 0.6 * has_losses))
    for name, (keeps, saved) in scenes.PRESERVATION_POLICIES.items():
        found[name] = Plot(_data_of_lives(keeps, saved), _draw_lives, INCH_OF_LIVES)
    found["best-link"] = Plot(_data_of_link, _draw_link, INCH_OF_LIVES)
    found["overhead-budget"] = Plot(tuned.budget_lines, _draw_budget, (7.0, 2.6))
    found["young-daly"] = Plot(tuned.goodput_lines, _draw_goodput, (7.0, 2.6))
    found["young-daly-learns"] = Plot(tuned.learning_lines, _draw_learning, (7.0, 2.2))
    return found


def digest_of(data: Any) -> str:
    """Of what is drawn, to six digits."""
    return hashlib.sha256(json.dumps(_rounded(data)).encode()).hexdigest()[:32]


def digest_in(file: Path) -> str:
    """The digest of the data that a plot was drawn from."""
    found = re.search(r"drawn from data ([0-9a-f]{32})", file.read_text())
    return "" if found is None else found.group(1)


def _data_of_saves(policy: Any, asked_s: float | None, has_losses: bool) -> Callable[[], Any]:
    def data() -> Any:
        losses = [(at_s, scenes.loss_of(step)) for step, at_s in scenes.moments()] if has_losses else []
        return {"saves": scenes.saves_of(policy, asked_s), "asked_s": asked_s, "losses": losses}

    return data


def _data_of_lives(policy: Any, saved: Sequence[tuple[int, float, bool]]) -> Callable[[], Any]:
    return lambda: [dataclasses.astuple(life) for life in scenes.lives_of(policy, saved)]


def _data_of_link() -> Any:
    lives = scenes.lives_of(*scenes.PRESERVATION_POLICIES["best-n"])
    return {"lives": [dataclasses.astuple(life) for life in lives], "best": scenes.best_of(lives)}


def _draw_saves(figure: Any, data: Any) -> None:
    axes = figure.subplots()
    updates = [at_s for _, at_s in scenes.moments()]
    asked_s = data["asked_s"]
    if asked_s is not None:
        updates = [at_s for at_s in updates if at_s <= asked_s]
        axes.axvline(asked_s, color=LINK, linewidth=0.8)
        axes.annotate("  asked to leave", (asked_s, 0.2), color=LINK, fontsize=7)
    _segments(axes, [(at_s, at_s, 0, 0.25) for at_s in updates], color=QUIET, linewidth=0.7)
    for colour, kind in ((SAVED, False), (TEMPORARY, True)):
        chosen = [(step, at_s) for step, at_s, is_temporary in data["saves"] if is_temporary is kind]
        _segments(axes, [(at_s, at_s, 0, 0.6) for _, at_s in chosen], color=colour, linewidth=1.8)
        for step, at_s in chosen if len(data["saves"]) < 20 else ():
            axes.annotate(str(step), (at_s, 0.66), ha="center", fontsize=7, color=colour)
    begins = float(scenes.EVALUATES_AFTER)
    axes.axvspan(begins, begins + scenes.EVALUATION_S, color="#f2f2f2", zorder=0)
    if asked_s is None:
        middle = (begins + scenes.EVALUATION_S / 2, 0.3)
        axes.annotate("evaluation", middle, ha="center", fontsize=7, color="#888888")
    if data["losses"]:
        other = axes.twinx()
        other.plot(*zip(*data["losses"], strict=True), color="#555555", linewidth=0.8)
        other.set_ylabel("loss", fontsize=7)
        other.set_yticks([])
        other.set_ylim(-1.0, 1.8)  # above the marks
        other.spines[["left", "right", "top"]].set_visible(False)
    axes.set(xlim=(0, scenes.UPDATES + scenes.EVALUATION_S + 2), ylim=(0, 1.9 if data["losses"] else 1), yticks=[])
    axes.set_xlabel("seconds", fontsize=7)
    axes.spines[["left", "right", "top"]].set_visible(False)


def _segments(axes: Any, lines: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """Straight lines from (x, y) to (x, y), given as x, x, y, y: one path of the file, not one for each."""
    xs = [x for x_from, x_to, *_ in lines for x in (x_from, x_to, math.nan)]
    ys = [y for *_, y_from, y_to in lines for y in (y_from, y_to, math.nan)]
    axes.plot(xs, ys, **style)


def _draw_lives(figure: Any, data: Any, axes: Any = None) -> None:
    axes = figure.subplots() if axes is None else axes
    end = max(from_s for _, from_s, *_ in data) + 8
    for colour, kind in ((SAVED, False), (TEMPORARY, True)):
        chosen = [(step, from_s, to_s) for step, from_s, to_s, _, is_temporary in data if is_temporary is kind]
        gone = [(from_s, to_s, step, step) for step, from_s, to_s in chosen if to_s is not None]
        kept = [(from_s, end, step, step) for step, from_s, to_s in chosen if to_s is None]
        _segments(axes, gone, color=colour, linewidth=0.9, marker="o", markersize=2.2, markevery=3)
        _segments(axes, kept, color=colour, linewidth=1.8, marker="o", markersize=2.2, markevery=3)
        for _, _, step, _ in kept:
            axes.annotate(f" {step}", (end, step), va="center", fontsize=6.5, color=colour)
    axes.set(xlim=(0, end * 1.09), xlabel="seconds", ylabel="step")
    axes.spines[["right", "top"]].set_visible(False)


def _draw_link(figure: Any, data: Any) -> None:
    axes = figure.subplots()
    _draw_lives(figure, data["lives"], axes)
    axes.step(*zip(*data["best"], strict=True), where="post", color=LINK, linewidth=1.4)
    axes.annotate("best", data["best"][-1], xytext=(-20, 5), textcoords="offset points", color=LINK, fontsize=8)


def _draw_budget(figure: Any, data: Any) -> None:
    left, right = figure.subplots(1, 2)
    left.axhline(100 * tuned.BUDGET, color=LINK, linewidth=0.8)
    left.annotate("max_fraction", (100, 100 * tuned.BUDGET + 0.06), color=LINK, fontsize=7)
    left.plot(*_minutes(data["share"], 100), color=SAVED, linewidth=1.2)
    left.set(ylim=(0, 4.2), xlabel="minutes", ylabel="spent on saves so far, %")
    right.plot(*_minutes(data["interval"]), color=SAVED, linewidth=0.8, marker="o", markersize=2)
    right.set(ylim=(0, None), xlabel="minutes", ylabel="seconds between two saves")
    for axes in (left, right):
        axes.axvspan(tuned.SLOWER_AFTER_S / 60, tuned.BUDGET_STEPS / 60 + 3, color="#f2f2f2", zorder=0)
        axes.set_xlim(0, tuned.BUDGET_STEPS / 60 + 3)
        axes.spines[["right", "top"]].set_visible(False)
    right.annotate("five times slower disk", (61.5, 8), fontsize=7)


def _draw_goodput(figure: Any, data: Any) -> None:
    axes = figure.subplots()
    xs, ys = zip(*data["fixed"], strict=True)
    axes.plot(xs, [100 * y for y in ys], color="#777777", marker="o", markersize=3, linewidth=1, label="fixed interval")
    for (name, colour), label in zip((("given", SAVED), ("estimated", TEMPORARY)), _labels(), strict=True):
        ((x, y),) = data[name]
        axes.plot([x], [100 * y], color=colour, marker="D", markersize=6, linestyle="", label=label)
    axes.set_xscale("log")
    axes.set_xticks(tuned.INTERVALS_S, [str(each) for each in tuned.INTERVALS_S])
    axes.minorticks_off()
    axes.set(xlabel="seconds between two saves", ylabel="useful part of the time, %")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["right", "top"]].set_visible(False)


def _draw_learning(figure: Any, data: Any) -> None:
    axes = figure.subplots()
    for (name, colour), label in zip((("given", SAVED), ("estimated", TEMPORARY)), _labels(), strict=True):
        axes.plot(*_minutes(data[name]), color=colour, linewidth=0.8, marker="o", markersize=2, label=label)
    axes.set(ylim=(0, None), xlabel="minutes", ylabel="seconds between two saves")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["right", "top"]].set_visible(False)


def _labels() -> tuple[str, str]:
    return f"YoungDalyPolicy({tuned.MTBF_S:g})", "YoungDalyPolicy()"


def _minutes(line: Sequence[tuple[float, float]], by: float = 1.0) -> tuple[list[float], list[float]]:
    return [x / 60 for x, _ in line], [y * by for _, y in line]


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_rounded(each) for each in data]
    return float(f"{data:.6g}") if isinstance(data, float) else data


def draw(name: str, plot: Plot, folder: Path) -> Path:
    """Draw one plot into a folder.

    Raises:
        ImportError: matplotlib is missing; it comes with the `bench` extra.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(SETTINGS):
        figure = plt.figure(figsize=plot.inches, layout="constrained")
        data = plot.data()
        plot.draw(figure, data)
        file = folder / f"{name}.svg"
        metadata = {"Description": f"drawn from data {digest_of(data)}", "Date": None, "Creator": None}
        figure.savefig(file, metadata=metadata)
        plt.close(figure)
    return file


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots().items():
        print(draw(name, plot, folder))


if __name__ == "__main__":
    main()
