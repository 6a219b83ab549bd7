"""How much of a run a page holds: what is more is left out, and the page says so."""

from __future__ import annotations

import dataclasses

MOST_BYTES = 5_000_000
"""Of a page. A megabyte and a quarter of it is the library that draws."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most of each kind that is drawn.

    Attributes:
        points: of a metric, and of the room on the disk.
        changed_leaves: of all pairs of steps together.
        leaves: in the tree.
        leaf_letters: of their names together.
    """

    saves: int = 1500
    steps: int = 2000
    processes: int = 1000
    points: int = 1000
    changed_leaves: int = 4000
    leaves: int = 20_000
    leaf_letters: int = 1_000_000

    def halved(self) -> Limits:
        """Half of everything."""
        return Limits(*(max(1, getattr(self, field.name) // 2) for field in dataclasses.fields(self)))
