"""An entry: what a run directory knows of one committed generation of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxckpt_train.steps.note_lines import count_of
from jaxckpt_train.steps.policy_context import CheckpointInfo
from jaxckpt_train.store.stored_metrics import metrics_from_json

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One committed generation of a step.

    Attributes:
        name: of its directory.
        sequence: the how-manieth save of the run it was; orders steps by when they were saved, also after a roll-back.
        run: id of the run that saved it; None: not told.
        left_behind: names of the directories that a roll-back before this save has left behind.
        notes: how many notes the run had on the disk when it was saved.
        damaged: what is wrong with its bytes, if it was set aside for that; None: nothing that is known.
        tells_lineage: whether its manifest could be read, and is of the run whose directory this is.
        is_certain: whether its manifest is what was committed; else what it says is not to be relied upon.
        is_held: whether that, or what was noted of it, is not known: retention neither counts nor deletes it.
        is_unsynced: whether the disk has refused to keep its bytes. A later sync may succeed all the same, since a
            system forgets what it could not write; so nothing that it replaces is deleted.
    """

    name: str
    step: int
    generation: int
    sequence: int
    time: datetime
    metrics: Mapping[str, float] | None
    temporary: bool
    run: str | None = None
    left_behind: tuple[str, ...] = ()
    notes: int = 0
    tells_lineage: bool = True
    is_certain: bool = True
    is_held: bool = False
    is_unsynced: bool = False
    pinned: bool = False
    damaged: str | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Later saves are greater."""
        return (self.sequence, self.step, self.generation)

    @property
    def identity(self) -> tuple[str, datetime]:
        """Which save it is; a name alone may be given again."""
        return (self.name, self.time)

    @property
    def tells_time(self) -> bool:
        """Whether its manifest says when it was saved."""
        return self.time != _LONG_AGO

    def info(self) -> CheckpointInfo:
        """The entry as policies see it."""
        return CheckpointInfo(self.step, self.time, self.metrics, self.pinned, self.temporary)


def entry_from_manifest(name: str, step: int, generation: int, info: Mapping[str, Any]) -> Entry:
    """An entry from the free-form part of its manifest; empty where that could not be read."""
    sequence, left = info.get("sequence"), info.get("left_behind")
    run = info.get("run")
    return Entry(
        name,
        step,
        generation,
        sequence=sequence if isinstance(sequence, int) and not isinstance(sequence, bool) else -1,
        time=_time(info.get("created")),
        metrics=metrics_from_json(info.get("metrics")) or None,
        temporary=info.get("temporary") is True,
        run=run if isinstance(run, str) else None,
        left_behind=tuple(each for each in left if isinstance(each, str)) if isinstance(left, list) else (),
        notes=count_of(info.get("notes")) or 0,
        tells_lineage=bool(info),
    )


def _time(value: object) -> datetime:
    try:
        found = datetime.fromisoformat(str(value))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        found.astimezone(UTC)  # as policies see it; kept as it is written, by which notes name it
    except (ValueError, OverflowError):
        return _LONG_AGO
    return found
