"""Which steps of a run are being read: retention leaves them alone meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from jaxckpt_train.steps.entry import Entry


class BeingRead:
    """The names of their directories, one for each reader.

    Args:
        guard: of the run: nobody decides what goes while somebody begins to read.
    """

    def __init__(self, guard: threading.RLock) -> None:
        self._guard, self._names = guard, list[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @contextlib.contextmanager
    def reading(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Within: these are being read."""
        names = [entry.name for entry in entries]
        with self._guard:
            self._names += names
        try:
            yield
        finally:
            with self._guard:
                for name in names:
                    self._names.remove(name)
