"""Runs one attempt of a training in a process of its own, and ends it when it is time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput_kills import Kill
from benchmarks.goodput_log import AttemptRecord, read
from benchmarks.goodput_training import Arguments
from benchmarks.machine import ROOT

SHOWN_CHARACTERS = 3000
POLL_S = 0.2
PREEMPTED = 75  # our exit code; Orbax's loop ends with 0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of a run. Times by the system's monotonic clock.

    Attributes:
        began_at: when it was started.
        sent_at: when it was killed, or asked to leave; None: it ended by itself before.
        ended_at: when it was gone.
        asked: whether it was asked to leave.
        code: its exit code, below 0 the signal that has ended it.
        record: its log.
    """

    began_at: float
    sent_at: float | None
    ended_at: float
    asked: bool
    code: int
    record: AttemptRecord

    @property
    def wall_s(self) -> float:
        """All its time."""
        return self.ended_at - self.began_at

    @property
    def left_itself(self) -> bool:
        """Whether it was asked to leave, and did before it was killed."""
        return self.asked and self.code != -signal.SIGKILL


class AttemptFailedError(RuntimeError):
    """A process has ended by itself, or in another way than it was to; the message has the end of its output."""


def run_attempt(
    given: Arguments, kill: Kill | None, left_s: float, under: Sequence[str] = (), least_updates: int = 0
) -> Attempt:
    """Start it, and end it as the schedule says.

    Args:
        given: its arguments.
        kill: its end; None: it ends by itself.
        left_s: seconds after which it is killed, unless it was asked to leave before.
        under: a command to put before.
        least_updates: updates that it completes before its end, if it has the time.

    Raises:
        AttemptFailedError: it has not ended so.
    """
    log = Path(given.log)
    command = [*under, sys.executable, "-m", "benchmarks.goodput_training", json.dumps(dataclasses.asdict(given))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with log.with_suffix(".out").open("wb") as output:
        began_at = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            sent_at, asked = _end(process, given, kill, began_at, left_s, least_updates)
        finally:
            process.kill()
            process.wait()
    ended_at = time.monotonic()
    if not _is_expected(process.returncode, sent_at, asked):
        text = log.with_suffix(".out").read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
        raise AttemptFailedError(f"{given.subject} left with {process.returncode}:\n{text}")
    return Attempt(began_at, sent_at, ended_at, asked, process.returncode, read(log))


def _end(
    process: subprocess.Popen[bytes],
    given: Arguments,
    kill: Kill | None,
    began_at: float,
    left_s: float,
    least_updates: int,
) -> tuple[float | None, bool]:
    """Send what is to be sent when it is time; when that was, and whether it was asked to leave."""
    until = began_at + (left_s if kill is None else min(kill.after_s, left_s))
    if _has_ended(process, until):
        return None, False
    while time.monotonic() < began_at + left_s and len(read(Path(given.log)).updates) < least_updates:
        if _has_ended(process, time.monotonic() + POLL_S):
            return None, False
    sent_at = time.monotonic()
    asks = kill is not None and kill.asks and kill.after_s < left_s
    if asks:
        process.send_signal(signal.SIGTERM)
        _has_ended(process, sent_at + given.grace_s)  # also where that is longer than its time
    process.kill()
    process.wait()
    return sent_at, asks


def _has_ended(process: subprocess.Popen[bytes], until: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    return process.returncode is not None


def _is_expected(code: int, sent_at: float | None, asked: bool) -> bool:
    if sent_at is None:
        return code == 0
    return code in ({0, PREEMPTED, -signal.SIGTERM, -signal.SIGKILL} if asked else {-signal.SIGKILL})
