"""The sources of notices of one run: started, asked, told and stopped together."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.notices.source import Notice, NoticeSource
from jaxckpt_train.value_checks import refuse, seconds

TELLING_S = 10.0  # that a source may take which does not say how long it may, once it is told that the job has left
_log = logging.getLogger("jaxckpt_train")


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

    def to_tell(self) -> list[tuple[Any, float]]:
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
