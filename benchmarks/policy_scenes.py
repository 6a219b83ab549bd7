"""Policy decisions in small trainings, for the plots of docs/reference/policies.md. Times and losses are made up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import jaxckpt_train as jct
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    DecisionContext,
    PreservationPolicy,
    SavePolicy,
    decide,
    steps_to_delete,
)
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.retention import BestLink, LinkToBest

START = datetime(2026, 3, 1, tzinfo=UTC)
UPDATES, EVALUATES_AFTER, EVALUATION_S = 120, 60, 15.0
SAVE_S = 4.0
ASKED_S = 100.0  # when the training of PreemptionCheckpointingPolicy is asked to leave
SAVES, EVERY_STEPS = 20, 10


@dataclasses.dataclass(frozen=True)
class Life:
    """One step: when it was saved, when it was deleted (None: it is still there), in seconds."""

    step: int
    from_s: float
    to_s: float | None
    loss: float
    is_temporary: bool = False


def loss_of(step: int) -> float:
    """A loss that falls, wavers, and rises again."""
    return 0.4 + math.exp(-step / 40) + 0.12 * math.sin(step / 7) + max(0, step - 120) / 400


def moments() -> list[tuple[int, float]]:
    """Updates of a second each, with an evaluation after the 60th: number, and when it is complete."""
    return [(step, step + EVALUATION_S * (step > EVALUATES_AFTER)) for step in range(1, UPDATES + 1)]


def odd_moments() -> list[tuple[int, float]]:
    """When a training of uneven speed saves by time: a step, and seconds."""
    return [(round(10.3 * number + 4 * math.sin(1.7 * number)), 10.0 * number) for number in range(1, SAVES + 1)]


def even_moments() -> list[tuple[int, float]]:
    """Saves every ten updates, ten seconds apart."""
    return [(EVERY_STEPS * number, 10.0 * number) for number in range(1, SAVES + 1)]


def time_of(seconds: float) -> datetime:
    """The time this many seconds after the start."""
    return START + timedelta(seconds=seconds)


def saves_of(policy: SavePolicy, asked_s: float | None = None) -> list[tuple[int, float, bool]]:
    """Which updates a policy saves: number, seconds, whether it is temporary; saves do not wait for each other."""
    found: list[tuple[int, float, bool]] = []
    previous: list[CheckpointInfo] = []
    ends_s = 0.0
    for step, at_s in moments():
        is_asked = asked_s is not None and at_s >= asked_s
        context = DecisionContext(
            time_of(at_s),
            is_saving_in_progress=at_s < ends_s,
            reached_preemption=is_asked,
            read_metrics=lambda step=step: {"loss": loss_of(step)},
            run_started=START,
        )
        decision = decide(policy, CheckpointInfo(step, time_of(at_s)), previous, context)
        if decision.save and at_s >= ends_s:
            found.append((step, at_s, decision.temporary))
            previous.append(CheckpointInfo(step, time_of(at_s), {"loss": loss_of(step)}, temporary=decision.temporary))
            ends_s = at_s + SAVE_S
        if is_asked:
            break
    return found


def lives_of(policy: PreservationPolicy, saved: Sequence[tuple[int, float, bool]]) -> list[Life]:
    """How long each step is there, if what a policy does not keep is deleted after each commit."""
    there: dict[int, CheckpointInfo] = {}
    lives: dict[int, Life] = {}
    for step, at_s, is_temporary in saved:
        loss = loss_of(step)
        there[step] = CheckpointInfo(step, time_of(at_s), {"loss": loss}, temporary=is_temporary)
        lives[step] = Life(step, at_s, None, loss, is_temporary)
        for gone in steps_to_delete([*there.values()], policy, context=DecisionContext(time_of(at_s))):
            del there[gone]
            lives[gone] = dataclasses.replace(lives[gone], to_s=at_s)
    return [*lives.values()]


class LinkRecorder:
    """A storage that only takes note of what a link stands for."""

    def __init__(self) -> None:
        self.target: str | None = None

    def point(self, path: str, target: str | None) -> None:
        """Take note of it."""
        self.target = target


def best_of(lives: Sequence[Life]) -> list[tuple[float, int]]:
    """What the link `best` stands for after each save: seconds, and a step."""
    recorder = LinkRecorder()
    link = LinkToBest(recorder, "runs/a", BestLink("loss"))
    found = []
    for life in lives:
        there = [each for each in lives if each.from_s <= life.from_s < (each.to_s or math.inf)]
        entries = [_entry(each) for each in there]
        link.update(lambda entries=entries: entries)
        found.append((life.from_s, int(str(recorder.target).partition("-")[2])))
    return found


def _entry(life: Life) -> Entry:
    return Entry(f"step-{life.step:010d}", life.step, 0, life.step, time_of(life.from_s), {"loss": life.loss}, False)


def lasting(steps: Sequence[tuple[int, float]]) -> list[tuple[int, float, bool]]:
    """Saves of which none is temporary."""
    return [(step, at_s, False) for step, at_s in steps]


MIXED = jct.AnySavePolicy([jct.FixedIntervalPolicy(40), jct.TemporarySavePolicy(jct.EverySecondsPolicy(10))])
SAVE_POLICIES: dict[str, SavePolicy] = {
    "fixed-interval": jct.FixedIntervalPolicy(20),
    "every-seconds": jct.EverySecondsPolicy(20),
    "specific-steps": jct.SpecificStepsPolicy([5, 15, 40, 90]),
    "initial": jct.InitialSavePolicy(),
    "continuous": jct.ContinuousCheckpointingPolicy(),
    "continuous-minimum": jct.ContinuousCheckpointingPolicy(minimum_interval_secs=12),
    "preemption": jct.PreemptionCheckpointingPolicy(),
    "improvement": jct.ImprovementPolicy("loss", "min"),
    "any-save": jct.AnySavePolicy([jct.FixedIntervalPolicy(50), jct.EverySecondsPolicy(20)]),
    "all-save": jct.AllSavePolicy([jct.FixedIntervalPolicy(10), jct.ImprovementPolicy("loss", "min")]),
    "temporary": MIXED,
}
PRESERVATION_POLICIES: dict[str, tuple[PreservationPolicy, Sequence[tuple[int, float, bool]]]] = {
    "preserve-all": (jct.PreserveAll(), lasting(even_moments())),
    "latest-n": (jct.LatestN(3), lasting(even_moments())),
    "best-n": (jct.BestN("loss", 2, "min"), lasting(even_moments())),
    "custom-steps": (jct.CustomSteps([40, 120]), lasting(even_moments())),
    "every-n-steps": (jct.EveryNSteps(50), lasting(even_moments())),
    "every-n-steps-chain": (jct.EveryNSteps(50, exact_interval=False), lasting(odd_moments())),
    "every-n-steps-closest": (jct.EveryNStepsClosest(50), lasting(odd_moments())),
    "every-n-seconds": (jct.EveryNSeconds(60), lasting(even_moments())),
    "latest-duration": (jct.LatestDuration(45), lasting(even_moments())),
    "any-preservation": (
        jct.AnyPreservationPolicy([jct.LatestN(2), jct.EveryNSteps(100), jct.BestN("loss", 1, "min")]),
        lasting(even_moments()),
    ),
    "temporary-lives": (jct.LatestN(2), saves_of(MIXED)),
}
