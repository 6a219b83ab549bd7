"""What a source of preemption notices is, and what a notice says."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Protocol

from jaxckpt_train.value_checks import refuse


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
