"""The requests that a stand-in server sees, and the faults that it answers them with."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import signal
import threading
from typing import Literal, Protocol

Kind = Literal[
    "put", "put_create", "put_update", "get", "head", "list", "delete", "delete_many", "part", "create_upload",
    "complete", "abort", "copy", "list_uploads", "other",
]  # fmt: skip


@dataclasses.dataclass
class Request:
    """A request, recorded once its body has arrived and before its effect.

    Attributes:
        method: "GET", "PUT" and so on.
        kind: what it asks for, in the same terms for all dialects.
        key: without the bucket; the prefix of a listing; "" if it names no key.
        range: the Range header, such as "bytes=0-9".
        number: counts from 1 since the list of requests was cleared.
        status: that of the response; None: there was no response, or not yet.
    """

    method: str
    kind: Kind
    key: str
    range: str | None
    number: int
    status: int | None = None


@dataclasses.dataclass(frozen=True)
class Fail:
    """Answer with this status, without the effect."""

    status: int
    retry_after: float | None = None


@dataclasses.dataclass(frozen=True)
class LoseResponse:
    """Let the effect happen, and close the connection without a response."""


@dataclasses.dataclass(frozen=True)
class Stall:
    """Wait before the effect and the response, even if the client leaves meanwhile; infinite: until the server ends."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class CutBody:
    """Let the effect happen, and cut the body of the response after this length."""

    after_bytes: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Close the connection, without the effect."""


Action = Fail | LoseResponse | Stall | CutBody | Refuse


class Faults(Protocol):
    """Decides which requests a server answers with a fault."""

    def decide(self, request: Request) -> Action | None:
        """Return the fault for a request before its effect; None: serve it. Many threads call this at a time."""


class CrashAt:
    """The whole service crashes at its n-th request, until `recover`.

    Attributes:
        crashed: the n-th request, once it has come.
    """

    def __init__(self, n: int, response_lost: bool) -> None:
        """Set when to crash.

        Args:
            n: the first n-1 requests work; all after the n-th are refused.
            response_lost: the n-th request has its effect, but no response; else it is refused, too.
        """
        self.crashed: Request | None = None
        self._left = n
        self._response_lost = response_lost
        self._recovered = False
        self._lock = threading.Lock()

    def decide(self, request: Request) -> Action | None:
        with self._lock:
            if self._recovered:
                return None
            self._left -= 1
            if self._left > 0:
                return None
            if self._left < 0:
                return Refuse()
            self.crashed = request
            return LoseResponse() if self._response_lost else Refuse()

    def recover(self) -> None:
        """Let all requests work from now on."""
        with self._lock:
            self._recovered = True


class RandomFaults:
    """Faults of a share of the requests; the same seed draws the same faults."""

    STATUSES = (429, 500, 503)

    def __init__(
        self,
        seed: int,
        fail: float = 0.05,
        cut: float = 0.01,
        lose: float = 0.0,
        stall: float = 0.0,
        stall_s: float = 0.05,
    ) -> None:
        """Set the share of each fault.

        Args:
            seed: of the draws.
            fail: the share that fails with status 429, 500 or 503.
            cut: the share whose response's body is cut.
            lose: the share whose response is lost after the effect.
            stall: the share that stalls.
            stall_s: the length of a stall.
        """
        self._random = random.Random(seed)
        self._shares = {"fail": fail, "cut": cut, "lose": lose, "stall": stall}
        self._stall_s = stall_s
        self._lock = threading.Lock()

    def decide(self, request: Request) -> Action | None:
        with self._lock:
            drawn = self._random.random()
            status = self._random.choice(self.STATUSES)
            length = self._random.randrange(1000)
        actions: dict[str, Action] = {
            "fail": Fail(status),
            "cut": CutBody(length),
            "lose": LoseResponse(),
            "stall": Stall(self._stall_s),
        }
        for name, share in self._shares.items():
            if drawn < share:
                return actions[name]
            drawn -= share
        return None


class Silent:
    """From a given request on, connections are accepted, and no request has an effect or an answer."""

    def __init__(self, n: int = 1) -> None:
        """Set the first request to leave unanswered."""
        self._left = n
        self._lock = threading.Lock()

    def decide(self, request: Request) -> Action | None:
        with self._lock:
            self._left -= 1
            return Stall(math.inf) if self._left <= 0 else None


class KillAt:
    """Kills a process once, when a key of this pattern is requested, before the request has an effect."""

    def __init__(self, pid: int, pattern: str, method: str | None = None) -> None:
        """Set the process, the pattern, and the method of the request; None: any."""
        self._pids, self._pattern, self._method = [pid], pattern, method

    def decide(self, request: Request) -> Action | None:
        if self._method in (None, request.method) and re.search(self._pattern, request.key):
            while self._pids:
                os.kill(self._pids.pop(), signal.SIGKILL)
        return None
