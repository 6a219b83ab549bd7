"""Compares what all attempts of all subjects have computed: a restored training must go on as if it never stopped."""

from __future__ import annotations

from benchmarks.goodput_attempt import Attempt


class Losses:
    """Every bit of the loss of the same update in different processes.

    Attributes:
        compared: how many.
        conflicts: those that differ, as text.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, str]] = {}
        self.compared = 0
        self.conflicts: list[str] = []

    def add(self, subject: str, attempt: Attempt) -> None:
        """Compare the updates of one attempt with those of the others before it."""
        for update in attempt.record.updates:
            if update.number not in self._seen:
                self._seen[update.number] = (update.loss, subject)
                continue
            loss, other = self._seen[update.number]
            self.compared += 1
            if loss != update.loss:
                self.conflicts.append(f"update {update.number}: {subject} {update.loss}, {other} {loss}")
