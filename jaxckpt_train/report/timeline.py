"""What happened when: the saves, restores, preemptions and other events of a run, with how long each took."""

from __future__ import annotations

import dataclasses
import datetime

from jaxckpt_train.report.report_event import ReportEvent, count, number, text, texts
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


def save_s_of(event: ReportEvent) -> float:
    """Seconds of a save from the call to the commit, without the time in which devices computed queued updates."""
    return max(event.save_s - min(event.save_s, number(event.device_wait_s) or 0.0), event.blocked_s)


def save_of(event: ReportEvent) -> Save:
    """The save that an event is about."""
    save_s = save_s_of(event)
    phases = {name: value for name in PHASES if (value := number(getattr(event, name))) is not None}
    return Save(
        began=event.before(save_s),
        ended=event.utc,
        step=event.step,
        name=text(event.name),
        ok=event.ok is True,
        reason=text(event.reason),
        error=text(event.error),
        blocked_s=event.blocked_s,
        background_s=save_s - event.blocked_s,
        save_s=save_s,
        phases=phases,
        bytes=count(event.bytes),
        bytes_per_s=number(event.bytes_per_s) if event.ok else None,
        metrics=metrics_from_json(event.metrics),
    )


def restore_of(event: ReportEvent) -> Restore:
    """The restore that an event is about."""
    restore_s = number(event.restore_s)
    return Restore(
        began=event.before(min(restore_s or 0.0, 1e9)),
        ended=event.utc,
        step=event.step,
        name=text(event.name),
        bytes=count(event.bytes),
        restore_s=restore_s,
        bytes_per_s=number(event.bytes_per_s),
        skipped=texts(event.skipped),
    )


def mark_of(event: ReportEvent) -> Mark | None:
    """The mark of an event that is neither a save nor a restore; None: it is not worth one."""
    if event.event == "preempted":
        about = "; ".join(filter(None, (text(event.reason), text(event.plan))))
    elif event.event == "set_aside":
        about = f"{text(event.name)}: {text(event.problem)}"
    elif event.event == "take_over":
        about = f"from process {count(event.pid)} on {text(event.host)}"
    else:
        return None
    return Mark(event.utc, event.event, event.step, about)
