"""What is wrong with the batches that a run takes after a resume, told by those of a run without an interruption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jaxckpt_train.testing.attempts import Attempt
from jaxckpt_train.testing.differences import Difference
from jaxckpt_train.testing.records import Batch, Update

DataFault = Literal["anew", "ahead", "behind", "order", "parts", "other"]
"""They begin anew; some are skipped, or come twice; the same examples in another order; only some arrays are others."""


def fault_of(found: Difference, attempts: Sequence[Attempt], straight: Attempt) -> tuple[DataFault, int]:
    """What is wrong with the batches from a difference on, and of how many if they are skipped or come twice."""
    attempt = attempts[found.number]
    expected = _batches(update for update in straight.updates)
    taken = _batches(update for update in attempt.updates if update.step >= found.step)
    if not taken or not expected:
        return "other", 0
    before = len(_batches(update for update in straight.updates if update.step < found.step))
    at = [place for place, batch in enumerate(expected) if _is_continued(expected, place, taken)]
    if 0 in at and attempt.resumed_at is not None and before:
        return "anew", before
    if at:
        offset = min((place - before for place in at), key=abs)
        if offset == 0 and isinstance(found.straight, int) and isinstance(found.resumed, int):
            offset = found.resumed - found.straight  # each start takes so many ahead
        return ("ahead" if offset > 0 else "behind"), abs(offset)
    if isinstance(found.straight, Batch) and isinstance(found.resumed, Batch):
        return _of_content(found.straight, found.resumed, expected), 0
    return "other", 0


def _batches(updates: Iterable[Update]) -> list[Batch]:
    return [batch for update in updates for batch in update.batches]


def _is_continued(expected: Sequence[Batch], place: int, taken: Sequence[Batch]) -> bool:
    """Whether the batches that were taken are those from a place on, as far as both go."""
    return all(one.digest == other.digest for one, other in zip(expected[place:], taken, strict=False))


def _of_content(straight: Batch, resumed: Batch, expected: Sequence[Batch]) -> DataFault:
    known = {row for batch in expected for row in batch.rows}
    digests = {batch.digest for batch in expected}
    if resumed.digest in digests or (resumed.rows and known.intersection(resumed.rows)):
        return "order"
    common = straight.leaves.keys() & resumed.leaves.keys()
    return "parts" if any(straight.leaves[name].same(resumed.leaves[name]) for name in common) else "other"
