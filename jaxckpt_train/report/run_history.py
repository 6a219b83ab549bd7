"""The history of a run as a report shows it: totals of all events, and of very many events a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jaxckpt_train.looking.run_look import StepLook
from jaxckpt_train.report.processes import place_of
from jaxckpt_train.report.report_event import ReportEvent
from jaxckpt_train.report.step_lives import Lives, StepsFound
from jaxckpt_train.report.thinning import Sample
from jaxckpt_train.report.timeline import Mark, Restore, Save, mark_of, restore_of, save_of, save_s_of
from jaxckpt_train.steps.attempts import Attempt, hear, settled

MOST_KINDS = 1000


@dataclasses.dataclass(frozen=True)
class Counts:
    """How much there was in all, where the lists of a report may hold a part.

    Attributes:
        blocked_s: that all saves held up the loop.
        states: how many steps there were in each state.
        changes: of the room on the disk.
        values: of each metric.
    """

    saves: int
    failed_saves: int
    blocked_s: float
    restores: int
    marks: int
    steps: int
    states: dict[str, int]
    changes: int
    values: dict[str, int]


class RunHistory:
    """Takes note of the events of a history, one after another.

    Args:
        names: of the directories of the steps that were there before the history was read.

    Attributes:
        events: how many events of each kind there are, in the order in which they came first.
        last: the last event; None: there was none.
        places: where each process ran.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.events: dict[str, int] = {}
        self.last: ReportEvent | None = None
        self.places: list[str] = []
        self._attempts: list[Attempt] = []
        self._lives = Lives(names)
        self._saves = Sample[ReportEvent](_weight)
        self._restores = Sample[Restore](lambda each: each.restore_s or 0.0)
        self._marks = Sample[Mark](lambda mark: mark.kind != "take_over")
        self._failed_saves, self._blocked_s = 0, 0.0

    def add(self, event: ReportEvent) -> None:
        """Take note of the next event."""
        kind = event.event
        name = kind if kind in self.events or len(self.events) < MOST_KINDS else "others"
        self.events[name] = self.events.get(name, 0) + 1
        self.last = event
        hear(self._attempts, event)
        self._lives.add(event)
        if kind == "save":
            self._saves.add(event)
            self._failed_saves += event.ok is not True
            self._blocked_s += event.blocked_s
        elif kind == "restore":
            self._restores.add(restore_of(event))
        elif kind == "start":
            self.places.append(place_of(event))
        elif (mark := mark_of(event)) is not None:
            self._marks.add(mark)

    def saves(self) -> list[Save]:
        """The saves, in order; of very many of each group of neighbours one that failed, or the longest."""
        return [save_of(event) for event in self._saves.items]

    def restores(self) -> list[Restore]:
        """The restores, in order; of very many the longest of each group of neighbours."""
        return self._restores.items

    def marks(self) -> list[Mark]:
        """The other events that are worth a mark, in order; of very many one of each group of neighbours."""
        return self._marks.items

    def attempts(self, is_live: bool) -> list[Attempt]:
        """All processes, in order; `is_live`: the last one is at work."""
        return settled(self._attempts, is_live=is_live)

    def steps(self, looks: Sequence[StepLook]) -> StepsFound:
        """What became of all steps, once all events were added; `looks`: the steps that are there."""
        return self._lives.found(looks)

    def counts(self, steps: StepsFound) -> Counts:
        """How much there was in all."""
        return Counts(
            saves=self._saves.count,
            failed_saves=self._failed_saves,
            blocked_s=self._blocked_s,
            restores=self._restores.count,
            marks=self._marks.count,
            steps=sum(steps.states.values()),
            states=steps.states,
            changes=steps.changes,
            values=steps.values,
        )


def _weight(event: ReportEvent) -> float:
    return save_s_of(event) + (0 if event.ok else 1e9)
