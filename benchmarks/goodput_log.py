"""The log of a training that may be killed at any moment: a line for each event, in a file."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of one process. Times by the system's monotonic clock, which all processes share.

    Attributes:
        number: of completed updates with it.
        at: when its loss was there.
        loss: every bit of it, by `float.hex`.
        called_s: seconds in the call of the checkpoint library after it; None: the process was over before it returned.
    """

    number: int
    at: float
    loss: str
    called_s: float | None


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """What one process has logged. None: it did not get that far.

    Attributes:
        made_at: when the model was there, and the restore began.
        restored_at: when the loop began.
        restored: the completed updates that it began with.
        updates: those that it has completed, in order.
    """

    made_at: float | None = None
    restored_at: float | None = None
    restored: int | None = None
    updates: tuple[Update, ...] = ()


class Log:
    """Writes the lines. Each is one call of the system: a kill leaves all before it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def made(self) -> None:
        """The model is there."""
        self._tell("made")

    def restored(self, completed: int) -> None:
        """The loop starts, with this many updates complete."""
        self._tell("restored", completed)

    def update(self, number: int, loss: float) -> None:
        """An update is complete."""
        self._tell("update", number, loss.hex())

    def called(self, number: int) -> None:
        """The checkpoint library's call for this update has returned."""
        self._tell("called", number)

    def _tell(self, *words: object) -> None:
        line = " ".join(map(str, (words[0], time.monotonic(), *words[1:])))
        os.write(self._file, f"{line}\n".encode())


def read(path: Path) -> AttemptRecord:
    """Read the log of a process; a missing file is an empty record."""
    if not path.exists():
        return AttemptRecord()
    made_at = restored_at = restored = None
    updates: list[Update] = []
    for line in path.read_text(encoding="ascii").splitlines():
        kind, at, *more = line.split()
        if kind == "made":
            made_at = float(at)
        elif kind == "restored":
            restored_at, restored = float(at), int(more[0])
        elif kind == "update":
            updates.append(Update(int(more[0]), float(at), more[1], None))
        elif updates[-1].number == int(more[0]):
            updates[-1] = dataclasses.replace(updates[-1], called_s=float(at) - updates[-1].at)
    return AttemptRecord(made_at, restored_at, restored, tuple(updates))
