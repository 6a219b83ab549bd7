"""What restores have found out about steps, until the owner writes it down: which are damaged, which whole again."""

from __future__ import annotations

import datetime
import threading

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.restoring import Restored

_Key = tuple[str, datetime.datetime]


class Verdicts:
    """The last verdict on each save of a step; a name alone may be given again."""

    def __init__(self) -> None:
        self._found: dict[_Key, tuple[Entry, str | None]] = {}
        self._guard = threading.RLock()

    def add(self, restored: Restored) -> None:
        """Take note of a restore: of steps that are proven to be damaged, and of one that is whole again."""
        entry = restored.entry
        with self._guard:
            self._found.pop(_key(entry), None)  # it may have been looked at while it was being copied here
            if restored.is_mended:
                self._found[_key(entry)] = (entry, None)
            for each in restored.skipped:
                if each.is_proven and each.entry.damaged is None:
                    self._found[_key(each.entry)] = (each.entry, each.problem)

    def damaged(self, entry: Entry, problem: str) -> None:
        """Take note of a step that is proven to be damaged."""
        with self._guard:
            self._found[_key(entry)] = (entry, problem)

    def take(self) -> tuple[Entry, str | None] | None:
        """One verdict, what is wrong or None for nothing, which is no longer here then; None: there is none."""
        with self._guard:
            return self._found.pop(next(iter(self._found))) if self._found else None


def _key(entry: Entry) -> _Key:
    return entry.name, entry.time
