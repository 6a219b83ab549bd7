"""Makes the keeper of a training in the goodput benchmark by the name of its subject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.goodput_subjects import NOTHING, Interval, Keeper, Nothing, Ours


def _ours(name: str, directory: Path, interval: Interval, grace_s: float) -> Keeper:
    import jaxckpt_train as jct

    policies: dict[str, Callable[[], Any]] = {
        "ours_fixed": lambda: jct.FixedIntervalPolicy(interval.steps),
        "ours_seconds": lambda: jct.EverySecondsPolicy(interval.seconds),
        "ours_budget": lambda: jct.OverheadBudgetPolicy(0.035),
        "ours_young_daly": lambda: jct.YoungDalyPolicy(),
    }
    return Ours(directory, policies[name](), grace_s)


def make_keeper(name: str, directory: Path, interval: Interval, grace_s: float) -> Keeper:
    """The subject with this name, on a run directory. Only the library that it needs is imported."""
    if name == NOTHING:
        return Nothing()
    if name.startswith("ours"):
        return _ours(name, directory, interval, grace_s)
    from benchmarks import goodput_orbax  # which imports Orbax

    return goodput_orbax.make_keeper(name, directory, interval)
