"""Sources of preemption notices: what they are, and how a run starts, asks, notifies and stops them."""

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

DEFAULT_LEFT_TIMEOUT_S = 10.0  # the default limit of a source's `left` method
_log = logging.getLogger("jaxckpt_train")
LEAST_S = 1.0


@dataclasses.dataclass(frozen=True)
class Notice:
    """A request to shut down.

    Attributes:
        reason: who requests it, and why; for the log and the history.
        asked_at: when the request may have come, in seconds of `time.monotonic()`; the grace period counts from there.
            None: when the loop notices it.
        leave_by: when the machine ends, in seconds of `time.monotonic()`: nothing is waited for after that, whatever
            the grace period is. None: unknown.

    Raises:
        SettingsError: the reason is not text, or a time is not a number.
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
    """An object that knows when this job has to shut down. `CheckpointCallback(notices=[...])` takes any such object.

    A source belongs to one callback. Each process of a job has its own; a notice in one process affects all of them.

    A source may have another method, `left(step)`. It is called in the primary after the job has shut down on request,
    whatever the source of the request, with the committed step (None: there is no such step), when the run directory is
    released. The sources are called in order. Each call may take `left_timeout_s` seconds, an attribute of the source
    (ten seconds without it), limited by the rest of the grace period, but at least one second. After that, a warning
    is logged, the call is not waited for, and `stop` is called.
    """

    def start(self) -> None:
        """Start looking for notices, for example on a thread. Called when the callback is entered; must not block."""

    def stop(self) -> None:
        """Stop looking. May be called without `start`, repeatedly, and in a forked child, which has no thread."""

    def notice(self) -> Notice | str | None:
        """The request to shut down, or only its reason, if there is one; from then on always.

        Called at every training step: it must take about a microsecond, must not wait and must not raise.
        """


class WatchedSources:
    """The sources of one run, used together.

    Args:
        sources: in the order in which they are asked.

    Raises:
        SettingsError: the `left_timeout_s` of a source is not a number of seconds.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._limits_s = [_limit_s(source) for source in self._sources]
        self._failing = set[int]()  # indices of sources whose failure was logged
        self._process: int | None = None

    def __bool__(self) -> bool:
        """Whether there are any sources."""
        return bool(self._sources)

    def start(self) -> None:
        """Start all sources; if one raises, stop all of them."""
        self._process = os.getpid()
        try:
            for source in self._sources:
                source.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all sources; log the errors of those that raise."""
        for source in self._sources:
            try:
                source.stop()
            except Exception:  # noqa: BLE001  # an error of a user's source must not break the end of a run
                _log.warning("%s: stopping it failed", type(source).__name__, exc_info=True)

    def notice(self) -> Notice | None:
        """The first notice, or None."""
        return next(self._found(), None)

    def asked_at(self) -> float:
        """When the first request may have come; infinity: unknown."""
        return min((each.asked_at for each in self._found() if each.asked_at is not None), default=math.inf)

    def leave_by(self) -> float:
        """When the machine ends; infinity: unknown."""
        return min((each.leave_by for each in self._found() if each.leave_by is not None), default=math.inf)

    def notification(self) -> list[tuple[Any, float]]:
        """The sources to notify after the shutdown, with the time limit of each; empty in a forked child."""
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
        """Ask one source. An error of a user's source does not stop the training, and is logged once."""
        try:
            found: object = source.notice()
            if found is None or isinstance(found, Notice):
                return found
            if isinstance(found, (bool, np.bool_)):  # not in the protocol, but refusing True would lose a save
                return Notice(type(source).__name__) if found else None
            if not isinstance(found, str):
                refuse(f"{type(source).__name__}.notice()", "a Notice, its reason as text, or None", found)
            return Notice(found)
        except Exception:  # noqa: BLE001  # called after each update
            if place not in self._failing:
                self._failing.add(place)
                text = "%s: asking it for a notice failed; it is asked again, and further failures are not logged"
                _log.warning(text, type(source).__name__, exc_info=True)
            return None


def _limit_s(source: NoticeSource) -> float:
    """The time limit of a source's `left` method."""
    limit_s = getattr(source, "left_timeout_s", None)
    return DEFAULT_LEFT_TIMEOUT_S if limit_s is None else seconds(f"{type(source).__name__}.left_timeout_s", limit_s)


def notify_sources(sources: WatchedSources, step: int | None, left_s: float) -> None:
    """Call `left` of the sources in order; log a warning for each one that takes too long, and do not wait for it.

    The order matters: after Slurm was asked to requeue the job, it may end the rest of it.

    Args:
        sources: the sources of the run.
        step: the committed step; None: there is none.
        left_s: the seconds left for all sources; each one gets at least `LEAST_S`.
    """
    notification, ends_at = sources.notification(), time.monotonic() + left_s
    for place, (source, limit_s) in enumerate(notification):
        reserved_s = LEAST_S * (len(notification) - place - 1)
        timeout_s = max(LEAST_S, min(limit_s, ends_at - time.monotonic() - reserved_s))
        if not call_within(functools.partial(_call_left, source, step), timeout_s):
            text = (
                "%s: its left() method has not finished after %.3g s, and is not waited for any longer: its effect, "
                "such as requeueing the job, may be missing"
            )
            _log.warning(text, type(source).__name__, timeout_s)


def _call_left(source: Any, step: int | None) -> None:
    try:
        source.left(step)
    except Exception:  # noqa: BLE001  # an error of a user's source must not end the thread with a traceback
        _log.warning("%s: its left() method failed", type(source).__name__, exc_info=True)
