"""Subject: what a worker needs of a checkpoint library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.arrays import State

Wait = Callable[[], None]


class Subject(Protocol):
    """A library under measurement, kept for all rounds of a workload.

    Attributes:
        arrays: the library of arrays that its users have, a key of `arrays.MODULES`.
        durable: a finished save leaves nothing unsynced; where False, the worker syncs the checkpoint afterwards.
        packages: the distributions whose versions belong to its figures.
    """

    arrays: str
    durable: bool
    packages: tuple[str, ...]

    def start_save(self, path: Path, state: State) -> Wait | None:
        """Save to the new directory `path`: begin, and return what waits for the end; or do it all, and return None."""

    def load(self, path: Path, like: State) -> State:
        """Load those leaves of what lies at `path` that `like` has, and as it describes them."""

    def close(self) -> None:
        """Free what is kept between rounds."""
