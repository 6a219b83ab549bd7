"""What restores have found out about steps, until the owner writes it down: which are damaged, which whole again."""

from __future__ import annotations

import datetime
import threading

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.restoring import Restored


class Verdicts:
    """The last verdict on each save of a step.

    Attributes:
        compared: the saves of which the last restore has compared all bytes, or found wrong ones.
    """

    def __init__(self) -> None:
        self.compared: frozenset[tuple[str, datetime.datetime]] = frozenset()
        self._found: dict[tuple[str, datetime.datetime], tuple[Entry, str | None]] = {}
        self._guard = threading.RLock()

    def add(self, restored: Restored) -> None:
        """Take note of a restore: of steps that are proven to be damaged, and of one that is whole again."""
        entry = restored.entry
        with self._guard:
            self._found.pop(entry.identity, None)  # it may have been looked at while it was being copied here
            if restored.is_mended:
                self._found[entry.identity] = (entry, None)
            proven = [each for each in restored.skipped if each.is_proven]
            for each in proven:
                if each.entry.damaged is None:
                    self._found[each.entry.identity] = (each.entry, each.problem)
            whole = {entry.identity} if restored.is_verified else set()
            self.compared = frozenset({each.entry.identity for each in proven} | whole)

    def damaged(self, entry: Entry, problem: str) -> None:
        """Take note of a step that is proven to be damaged."""
        with self._guard:
            self._found[entry.identity] = (entry, problem)

    def take(self) -> tuple[Entry, str | None] | None:
        """One verdict, what is wrong or None for nothing, which is no longer here then; None: there is none."""
        with self._guard:
            if not self._found:
                return None
            entry, problem = self._found.pop(next(iter(self._found)))
        if problem is None:
            return entry, None
        return entry, problem.encode("utf-8", "backslashreplace").decode(
            "utf-8"
        )  # it names a path, which may be no text
