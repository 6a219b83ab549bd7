"""The schedule of a goodput benchmark: when each attempt is ended and by which signal, the same for all subjects."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Kill:
    """The end of one attempt.

    Attributes:
        after_s: since its process was started.
        asks: whether it is asked to leave by SIGTERM, and killed once its grace period is over; else it is killed.
    """

    after_s: float
    asks: bool

    @property
    def signal(self) -> signal.Signals:
        """What is sent."""
        return signal.SIGTERM if self.asks else signal.SIGKILL


def schedule(seed: int, *, least_s: float, mean_s: float, most_s: float) -> Iterator[Kill]:
    """Endless ends: times as of a Poisson process after the first seconds; of each two one asks.

    Args:
        seed: the same gives the same.
        least_s: before that nothing ends: most processes should have begun to train.
        mean_s: between two.
        most_s: after that everything has.
    """
    chance = random.Random(seed)
    while True:
        pair = [True, False]
        chance.shuffle(pair)
        for asks in pair:
            yield Kill(min(most_s, least_s + chance.expovariate(1 / (mean_s - least_s))), asks)


def within(kills: Sequence[Kill], seconds: float) -> list[Kill]:
    """The kills of a run of this many seconds whose processes end at once."""
    found: list[Kill] = []
    for kill in kills:
        seconds -= kill.after_s
        if seconds < 0:
            break
        found.append(kill)
    return found


def mtbf_s(kills: Sequence[Kill], start_s: float) -> float:
    """Seconds of training between two ends that lose updates, to a job that saves when it is asked to leave.

    Args:
        kills: of a run.
        start_s: from the start of a process until it trains.
    """
    trained_s = sum(max(0.0, kill.after_s - start_s) for kill in kills)
    return trained_s / max(1, sum(not kill.asks for kill in kills))
