"""What restores have found out about steps, until the owner writes it down: which are damaged, which whole again."""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable

from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.restored import Restored

_log = logging.getLogger("jaxckpt_train")


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

    def write(self, write: Callable[[Entry, str | None], bool]) -> list[tuple[Entry, str]]:
        """Have all of them written down; those that are set aside now, and why.

        Args:
            write: writes one, and says whether it did. A disk that refuses costs no training: it is found out again.
        """
        set_aside = []
        for entry, problem in iter(self._take, None):
            try:
                is_written = write(entry, problem)
            except StorageError as error:
                _log.warning("step %d could not be set aside: %s", entry.step, error)
                continue
            if is_written and problem is not None:
                told = "stays for you to look at, or to remove, and is not listed any more"
                _log.warning("step %d is set aside as damaged: %s %s", entry.step, entry.name, told)
                set_aside.append((entry, problem))
        return set_aside

    def _take(self) -> tuple[Entry, str | None] | None:
        """One verdict, what is wrong or None for nothing, which is no longer here then; None: there is none."""
        with self._guard:
            if not self._found:
                return None
            entry, problem = self._found.pop(next(iter(self._found)))
        return entry, None if problem is None else _as_text(problem)


def _as_text(problem: str) -> str:
    """It names a path, which may be no text."""
    return problem.encode("utf-8", "backslashreplace").decode("utf-8")
