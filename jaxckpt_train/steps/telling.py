"""Telling the sources of notices that the job has left: one after the other, each within a time of its own."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from jaxckpt_train.notices.watched_sources import WatchedSources
from jaxckpt_train.pending import call_within

LEAST_S = 1.0
_log = logging.getLogger("jaxckpt_train")


def tell_sources(sources: WatchedSources, step: int | None, left_s: float) -> None:
    """Tell those who want to know it; who takes too long is told of by a warning, and not waited for.

    One after the other: once Slurm was asked to start the job again it may end what is left of this one.

    Args:
        sources: of the run.
        step: that is committed; None: there is none.
        left_s: seconds that there are for all of them; each gets at least `LEAST_S`.
    """
    to_tell, ends_at = sources.to_tell(), time.monotonic() + left_s
    for place, (source, limit_s) in enumerate(to_tell):
        of_others_s = LEAST_S * (len(to_tell) - place - 1)
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
