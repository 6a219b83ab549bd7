"""What a restore brought back, or why it has to look again."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from jaxckpt_train.steps.entry import Entry

_log = logging.getLogger("jaxckpt_train")


class StepVanishedError(Exception):
    """A step was deleted by its owner after it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that could not be restored; whether its bytes are proven to be wrong, or only could not be read now."""

    entry: Entry
    problem: str
    is_proven: bool


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore brought back, from which step, and past which it had to skip."""

    entry: Entry
    results: dict[str, Any]
    skipped: list[Skipped]
    bytes: int
    restore_s: float
    is_mended: bool = False  # it was set aside, and all of it was verified now
    is_verified: bool = False  # all of it was compared by this; asked for only where another one was skipped
    left_out: frozenset[str] = frozenset()  # names of what the step has and nobody asked for

    def warn_of_left_out(self) -> None:
        """For a run that goes on from it: what was not restored, such as the position in the data, is at its start."""
        if self.left_out:
            names = ", ".join(map(repr, sorted(self.left_out)))
            _log.warning("step %d also has %s, not asked for: what is not restored begins anew", self.entry.step, names)

    def record(self) -> dict[str, Any]:
        """What the history says of it."""
        return {
            "step": self.entry.step,
            "name": self.entry.name,
            "bytes": self.bytes,
            "restore_s": self.restore_s,
            "bytes_per_s": round(self.bytes / self.restore_s),
            "skipped": [each.entry.name for each in self.skipped] or None,
        }
