"""How the processes of a job leave at one place, though a request to leave reaches only some of them at first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

import msgspec

from jaxckpt_train.jobs.coordinator import Coordinator
from jaxckpt_train.multihost import PreemptionService
from jaxckpt_train.steps.ticks import Ticks
from jaxckpt_train.steps.together import leave_order

NOTICED_WITHIN_S = 1.0
"""The service looks for signals so often."""


class Agreement(Protocol):
    """What the processes of a job agree on at the calls that all of them make.

    Attributes:
        reason: why they leave, where this process has noticed nothing.
    """

    reason: str

    def is_agreed(self, noticed: bool) -> bool:
        """Whether all leave at this call; `noticed`: this process has noticed a request."""

    def noticed_before_s(self) -> float:
        """How many seconds before that the request may have come."""

    def leave(self) -> None:
        """This process asks no more; whoever waits for it is told."""


class Alone:
    """There is no other process."""

    reason = "itself"

    def is_agreed(self, noticed: bool) -> bool:
        """Whether it was noticed."""
        return noticed

    def noticed_before_s(self) -> float:
        """Its own notices tell."""
        return 0.0

    def leave(self) -> None:
        """Nobody waits."""


class ByService:
    """By JAX's preemption service, which has a SIGTERM handler of its own, in C++, that no handler may replace.

    What is noticed otherwise is told to it by that signal, which this process sends to itself.
    """

    reason = "SIGTERM to a process of this job"

    def __init__(self, service: PreemptionService) -> None:
        self._service = service
        self._is_sent = False

    def is_agreed(self, noticed: bool) -> bool:
        """As the service says, from the call on at which it does."""
        if noticed and not self._is_sent:
            self._is_sent = True
            signal.raise_signal(signal.SIGTERM)
        return self._service.is_reached()

    def noticed_before_s(self) -> float:
        """As the service tells, which looks for signals now and then."""
        return self._service.noticed_before_s() + NOTICED_WITHIN_S

    def leave(self) -> None:
        """Nobody waits: the service finds out by itself."""


class _Said(msgspec.Struct, array_like=True):
    is_agreed: bool
    next: int


class ByExchange:
    """By an exchange about once a second, where JAX's service is switched off.

    Args:
        everyone: the processes.
        timeout_s: seconds without a sign of life after which a process is not waited for.
        monotonic: the time in seconds.
    """

    reason = "another process of this job, which was asked to"

    def __init__(self, everyone: Coordinator, timeout_s: float, monotonic: Callable[[], float]) -> None:
        self._everyone, self._timeout_s = everyone, timeout_s
        self._ticks = Ticks(everyone.processes, monotonic)
        self._order: Coordinator | None = None  # begun by the first look, which all make
        self._is_agreed = False

    def is_agreed(self, noticed: bool) -> bool:
        """Whether one has noticed, as of the last tick."""
        if not self._is_agreed and self._ticks.is_due():
            self._order = self._order or self._everyone.within("preemption", self._timeout_s)
            said = msgspec.msgpack.decode(
                self._order.exchange(
                    "looking whether to leave",
                    lambda: b"!" if noticed else b"",
                    lambda values: msgspec.msgpack.encode(_Said(any(values), self._ticks.next())),
                ),
                type=_Said,
            )
            self._ticks.set_next(said.next)
            self._is_agreed = said.is_agreed
        return self._is_agreed

    def noticed_before_s(self) -> float:
        """Its own notices tell; of others it is not known, and not long ago."""
        return 0.0

    def leave(self) -> None:
        """As the protocol says."""
        order, self._order = self._order, None
        if order is not None:
            leave_order(order)
