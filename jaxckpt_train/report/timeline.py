"""What happened when: the saves, restores, preemptions and other events of a run, with how long each took."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence

from jaxckpt_train.report.told_events import Told
from jaxckpt_train.store.stored_metrics import metrics_from_json

PHASES = ("decide_s", "wait_s", "device_wait_s", "snapshot_s", "stage_s", "write_s", "commit_s")


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that was committed, or has failed.

    Attributes:
        began, ended: from the call to the commit, without the time in which devices computed queued updates.
        blocked_s: that the loop was held up.
        background_s: the rest of it.
        phases: seconds of each that was told.
    """

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    ok: bool
    reason: str
    error: str
    blocked_s: float
    background_s: float
    save_s: float
    phases: dict[str, float]
    bytes: int | None
    bytes_per_s: float | None
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Restore:
    """A step that was restored; `skipped`: the names of damaged ones that were passed over."""

    began: datetime.datetime
    ended: datetime.datetime
    step: int | None
    name: str
    bytes: int | None
    restore_s: float | None
    bytes_per_s: float | None
    skipped: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Another event that a reader wants to see: a preemption, a step set aside, a lock taken over."""

    time: datetime.datetime
    kind: str
    step: int | None
    text: str


def saves_of(told: Iterable[Told]) -> list[Save]:
    """The saves, in order."""
    return [_save(each) for each in told if each.kind == "save"]


def _save(told: Told) -> Save:
    event = told.event
    save_s = max(event.save_s - min(event.save_s, told.number("device_wait_s") or 0.0), event.blocked_s)
    phases = {name: value for name in PHASES if (value := told.number(name)) is not None}
    return Save(
        began=told.before(save_s),
        ended=told.time,
        step=event.step,
        name=told.text("name"),
        ok=event.ok is True,
        reason=told.text("reason"),
        error=told.text("error"),
        blocked_s=event.blocked_s,
        background_s=save_s - event.blocked_s,
        save_s=save_s,
        phases=phases,
        bytes=told.count("bytes"),
        bytes_per_s=told.number("bytes_per_s") if event.ok else None,
        metrics=metrics_from_json(told.fields.get("metrics")),
    )


def restores_of(told: Iterable[Told]) -> list[Restore]:
    """The restores, in order."""
    found = []
    for each in told:
        if each.kind == "restore":
            restore_s = each.number("restore_s")
            found.append(
                Restore(
                    began=each.before(min(restore_s or 0.0, 1e9)),
                    ended=each.time,
                    step=each.event.step,
                    name=each.text("name"),
                    bytes=each.count("bytes"),
                    restore_s=restore_s,
                    bytes_per_s=each.number("bytes_per_s"),
                    skipped=each.texts("skipped"),
                )
            )
    return found


def marks_of(told: Iterable[Told]) -> list[Mark]:
    """The other events that are worth a mark, in order."""
    texts = {
        "preempted": lambda each: "; ".join(filter(None, (each.text("reason"), each.text("plan")))),
        "set_aside": lambda each: f"{each.text('name')}: {each.text('problem')}",
        "take_over": lambda each: f"from process {each.count('pid')} on {each.text('host')}",
    }
    return [Mark(each.time, each.kind, each.event.step, texts[each.kind](each)) for each in told if each.kind in texts]


def counts_of(told: Sequence[Told]) -> dict[str, int]:
    """How many events there are of each kind, in the order in which they came first."""
    found: dict[str, int] = {}
    for each in told:
        found[each.kind] = found.get(each.kind, 0) + 1
    return found
