"""Telling the sources of notices that the job has left: one after the other, each within a time of its own.

The sources of notices of one run: started, asked, told and stopped together.

What a source of preemption notices is, and what a notice says.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import numbers
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxckpt_train._validation import refuse, seconds
from jaxckpt_train.pending import call_within

TELLING_S = 10.0  # that a source may take which does not say how long it may, once it is told that the job has left
_log = logging.getLogger("jaxckpt_train")
LEAST_S = 1.0


@dataclasses.dataclass(frozen=True)
class Notice:
    """A request to leave.

    Attributes:
        reason: who asks, and for what; it stands in the log and in the history.
        asked_at: when the request may have come, in seconds of `time.monotonic()`; the grace period counts from there.
            None: when the loop looks.
        leave_by: when the machine is gone, in seconds of `time.monotonic()`: nothing is waited for beyond that, however
            long the grace period is. None: not known.

    Raises:
        SettingsError: the reason is no text, or a time is no number.
    """

    reason: str
    asked_at: float | None = None
    leave_by: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            refuse("Notice.reason", "text", self.reason)
        for name in ("asked_at", "leave_by"):
            found: object = getattr(self, name)
            if found is not None and not _is_time(found):
                refuse(f"Notice.{name}", "seconds of time.monotonic(), or None", found)


def _is_time(found: object) -> bool:
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        return False
    try:
        return not math.isnan(float(found))
    except OverflowError:
        return False


class NoticeSource(Protocol):
    """Something that knows when this job has to leave. `CheckpointCallback(notices=[...])` takes any such object.

    One source belongs to one callback. Of the processes of a job each has its own; what one notices, all act on.

    A source may have another method, `left(step)`: called once the job has left on request, by whatever notice, in
    process 0 only, with the committed step (None: there is none) and the run directory let go of. Sources are told one
    after the other. Each is waited for as many seconds as its attribute `left_timeout_s` says, without one ten, and
    within what is left of the grace period, but at least one. What takes longer is told of by a warning, and left
    behind; `stop` comes then.
    """

    def start(self) -> None:
        """Begin to look, as on a thread. Called when the callback is entered; may warn, and takes no time."""

    def stop(self) -> None:
        """End that. May be called without `start`, again, and in a forked child, which has no thread of its parent."""

    def notice(self) -> Notice | str | None:
        """The request to leave, or its reason alone, if one came; from then on always.

        Called at every training step: it takes a microsecond, waits for nothing and raises nothing.
        """


class WatchedSources:
    """All of them as one.

    Args:
        sources: in the order in which they are asked.

    Raises:
        SettingsError: the `left_timeout_s` of one is no number of seconds.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._limits_s = [_limit_s(source) for source in self._sources]
        self._failing = set[int]()  # places of those whose failure was told
        self._process: int | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sources)

    def start(self) -> None:
        """Start them; if one raises, none is left started."""
        self._process = os.getpid()
        try:
            for source in self._sources:
                source.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop them all; one that raises keeps no other from it."""
        for source in self._sources:
            try:
                source.stop()
            except Exception:  # noqa: BLE001  # a source of the user's own must not cost the end of a run
                _log.warning("%s: stopping it failed", type(source).__name__, exc_info=True)

    def notice(self) -> Notice | None:
        """The first notice that there is."""
        return next(self._found(), None)

    def asked_at(self) -> float:
        """When the first request may have come; infinity: nobody says."""
        return min((each.asked_at for each in self._found() if each.asked_at is not None), default=math.inf)

    def leave_by(self) -> float:
        """When the machine is gone; infinity: nobody says."""
        return min((each.leave_by for each in self._found() if each.leave_by is not None), default=math.inf)

    def notification(self) -> list[tuple[Any, float]]:
        """Those who want to know when the job has left, and seconds that each may take; none in a fork."""
        if os.getpid() != self._process:
            return []
        both = zip(self._sources, self._limits_s, strict=True)
        return [(source, limit_s) for source, limit_s in both if getattr(source, "left", None) is not None]

    def _found(self) -> Iterator[Notice]:
        for place, source in enumerate(self._sources):
            found = self._asked(place, source)
            if found is not None:
                yield found

    def _asked(self, place: int, source: NoticeSource) -> Notice | None:
        """What a source has found; one of the user's own that fails costs no training, and is told of once."""
        try:
            found: object = source.notice()
            if found is None or isinstance(found, Notice):
                return found
            if isinstance(found, (bool, np.bool_)):  # it is clear what is meant, and to refuse True would lose a save
                return Notice(type(source).__name__) if found else None
            if not isinstance(found, str):
                refuse(f"{type(source).__name__}.notice()", "a Notice, its reason as text, or None", found)
            return Notice(found)
        except Exception:  # noqa: BLE001  # it is asked after each update
            if place not in self._failing:
                self._failing.add(place)
                told = "%s: asking it for a notice failed; it is asked again, and not told of again"
                _log.warning(told, type(source).__name__, exc_info=True)
            return None


def _limit_s(source: NoticeSource) -> float:
    """How long a source may take over it when it is told that the job has left."""
    limit_s = getattr(source, "left_timeout_s", None)
    return TELLING_S if limit_s is None else seconds(f"{type(source).__name__}.left_timeout_s", limit_s)


def notify_sources(sources: WatchedSources, step: int | None, left_s: float) -> None:
    """Tell those who want to know it; who takes too long is told of by a warning, and not waited for.

    One after the other: once Slurm was asked to start the job again it may end what is left of this one.

    Args:
        sources: of the run.
        step: that is committed; None: there is none.
        left_s: seconds that there are for all of them; each gets at least `LEAST_S`.
    """
    notification, ends_at = sources.notification(), time.monotonic() + left_s
    for place, (source, limit_s) in enumerate(notification):
        of_others_s = LEAST_S * (len(notification) - place - 1)
        timeout_s = max(LEAST_S, min(limit_s, ends_at - time.monotonic() - of_others_s))
        if not call_within(functools.partial(_tell, source, step), timeout_s):
            text = (
                "%s: told that the job has left, it is not done after %.3g s and not waited for any longer: what it "
                "was to do then, such as having the job started again, may not happen"
            )
            _log.warning(text, type(source).__name__, timeout_s)


def _tell(source: Any, step: int | None) -> None:
    try:
        source.left(step)
    except Exception:  # noqa: BLE001  # a thread's edge; a source of the user's own
        _log.warning("%s: telling it that the job has left failed", type(source).__name__, exc_info=True)
