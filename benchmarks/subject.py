"""Subject: what the rounds need of a checkpoint library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.workloads import Tree

Wait = Callable[[], None]


class Subject(Protocol):
    """A library under measurement, kept for all rounds.

    Attributes:
        name: as on the command line.
        durable: a finished save leaves nothing unsynced; where False, the rounds sync the checkpoint afterwards.
    """

    name: str
    durable: bool

    def start_save(self, path: Path, tree: Tree) -> Wait:
        """Begin to save to the new directory `path`; the returned function waits until the save is finished."""

    def load(self, path: Path, like: Tree) -> Tree:
        """Load what lies at `path` into arrays as `like` describes them."""

    def close(self) -> None:
        """Free what is kept between rounds."""
