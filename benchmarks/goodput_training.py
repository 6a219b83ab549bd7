"""One attempt of a training that may be killed at any moment: `python -m benchmarks.goodput_training ARGUMENTS`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.goodput_keepers import make_keeper
from benchmarks.goodput_log import Log
from benchmarks.goodput_subjects import GRACE_S, Interval
from benchmarks.lm_training import configure, lm_training


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of an attempt.

    Attributes:
        subject: its name.
        directory: of the run, which the attempts of a subject share.
        log: the file of its log.
        cache: of what XLA has compiled.
        size: of the model.
        interval_steps, interval_s: see `Interval`.
        most_updates: the attempt ends after this many of its own updates, as if killed; None: no limit.
        grace_s: seconds from a request to leave until it is killed, of which our library knows.
    """

    subject: str
    directory: str
    log: str
    cache: str
    size: dict[str, Any]
    interval_steps: int
    interval_s: float
    most_updates: int | None = None
    grace_s: float = GRACE_S


def train(given: Arguments) -> None:
    """Restore the newest checkpoint, and train until somebody ends it."""
    log = Log(Path(given.log))
    config = configure(given.size, Path(given.cache))
    interval = Interval(given.interval_steps, given.interval_s)
    with (
        make_keeper(given.subject, Path(given.directory), interval, given.grace_s) as keeper,
        lm_training(config) as training,
    ):
        log.made()
        began = keeper.resume(training)
        log.restored(began)
        for step in keeper.steps():
            loss = training.update()
            log.update(step + 1, float(loss))
            keeper.completed(training, step + 1, loss)
            log.called(step + 1)
            if given.most_updates is not None and step + 1 - began >= given.most_updates:
                os._exit(0)


if __name__ == "__main__":
    train(Arguments(**json.loads(sys.argv[1])))
