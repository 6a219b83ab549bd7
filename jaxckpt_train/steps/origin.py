"""What a process goes on from, until it has saved: what others have saved since is not left behind unasked."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import left_behind_by
from jaxckpt_train.steps.refusals import Seen, refuse_unseen, seen_of, unseen_steps


class Origin:
    """The step that was restored, or that there was none, and what there was in the run by then.

    Attributes:
        entry: of the step that was restored; None: none was, or this process has saved since.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self._seen: Seen | None = None  # None: it has not looked

    def restored(self, entry: Entry, there: Sequence[Entry]) -> None:
        """It goes on from this step, which was chosen from what was there."""
        self.entry, self._seen = entry, seen_of([entry, *there])

    def nothing(self) -> None:
        """It has looked, and begins from scratch as there is no step."""
        if self.entry is None:
            self._seen = {}

    def saved(self) -> None:
        """It goes on from what it has saved."""
        self.entry = self._seen = None

    def left_behind(self, there: Sequence[Entry], before: frozenset[str]) -> frozenset[str]:
        """The names of what it leaves behind by going on; of what was left `before` if it knows of nothing."""
        if self.entry is None or self._seen is None or unseen_steps(there, self._seen):
            return before
        return left_behind_by(self.entry, there)

    def refuse(self, directory: str, there: Sequence[Entry]) -> None:
        """Raise CheckpointExistsError if others have saved since."""
        if self._seen is not None:
            refuse_unseen(directory, self.entry, there, self._seen)
