"""What saves cost a loop, and how often its run fails: what policies that tune themselves go by."""

from __future__ import annotations

import dataclasses

PRIOR_FAILURES, PRIOR_OBSERVED_S = 0.5, 60.0


@dataclasses.dataclass(frozen=True)
class SaveCosts:
    """What was measured so far, in seconds. None: not known yet.

    Attributes:
        step_s: for one update while nothing is being saved.
        cost_s: that the loop loses by one save: the time in which it is held up, and what the updates beside the save
            take longer. It stays as it is until what is measured differs by a tenth.
        blocked_s: of these, the time in which the loop is held up.
        duration_s: from the begin of a save until it is committed; the longest of the last few.
        usual_s: the same, the median of the last few.
        is_measuring: whether a save is under way, or the update after it, of which it is not known yet what it costs.
        is_unseen: whether updates have to be seen without a save before the next one: there were none between the last
            saves, so what these cost is not known well.
        spent_s: that all saves of this process have cost so far.
        trained_s: since this process began to train, without what saves have cost.
        ahead_s: for which the devices had work at the last save, as the loop does not wait for them; 0.0: it does.
    """

    step_s: float | None = None
    cost_s: float | None = None
    blocked_s: float | None = None
    duration_s: float | None = None
    usual_s: float | None = None
    is_measuring: bool = False
    is_unseen: bool = False
    spent_s: float = 0.0
    trained_s: float = 0.0
    ahead_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often a run has failed without having saved, and in which time.

    Attributes:
        count: processes of the run that ended so: killed, or asked to leave with too little time for a save.
        observed_s: seconds that all processes of the run have lived for.
    """

    count: int = 0
    observed_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures that this suggests, in seconds.

        A run that has not failed yet may fail all the same: half a failure in one minute is what is taken for known
        before anything is (the mean of a Gamma prior of the rate). So a run that has not failed expects to do so in
        twice the time that it has lived, whatever that is, and one that has failed soon expects what it has seen.
        """
        return (PRIOR_OBSERVED_S + self.observed_s) / (PRIOR_FAILURES + self.count)
