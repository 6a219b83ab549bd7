"""What the manifest of the next save says of its place in the run: which run, the how manieth save, what it leaves."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import RollBack, home_run, last_sequence


class NextSave:
    """Its number is above that of every save there ever was, also of those that failed or were deleted."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex
        self._highest = -1
        self._undone: set[str] = set()  # saves that failed, and lie there as if they had not

    def found(self, entries: Sequence[Entry], noted: RollBack) -> None:
        """Take note of what is in the run directory."""
        self._highest = max(self._highest, last_sequence(entries, noted))

    def goes_on(self, entries: Sequence[Entry]) -> None:
        """It is a save of the run to which these belong."""
        self._run = home_run(entries) or self._run

    def gone(self, sequences: Iterable[int]) -> None:
        """Take note of saves that were deleted, which a power cut may bring back."""
        self._highest = max(self._highest, *sequences, -1)

    def failed(self, sequence: int, stays: str | None) -> None:
        """Take note of a save that failed; `stays`: the name under which it lies there all the same, for nobody."""
        self._highest = max(self._highest, sequence)
        self._undone.update([] if stays is None else [stays])

    def saved(self, name: str) -> None:
        """Take note of a save that has a name which is not that of a failed one any more."""
        self._undone.discard(name)

    def place(self, entries: Sequence[Entry], left_behind: Collection[str], notes: int) -> dict[str, Any]:
        """For its manifest.

        Args:
            entries: all steps that are there.
            left_behind: the names of those that it does not go on from.
            notes: how many notes of the run there are.
        """
        sequence = max(self._highest, *(entry.sequence for entry in entries), -1) + 1
        left = sorted({*left_behind, *self._undone})
        return {"run": self._run, "sequence": sequence, "left_behind": left, "notes": notes}
