"""Silence: for how long processes that are waited for have given no sign of life."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

TELL_S = 30.0  # between two lines about who is waited for


class Silence:
    """How long processes have given no sign of life. Only time in which this one was awake counts.

    Attributes:
        numbers: of those that are waited for.
        signs: the last one of each.
        waited_s: for how long.
    """

    def __init__(self, numbers: Sequence[int], limit_s: float, period_s: float, slice_s: float) -> None:
        self.numbers, self.signs, self.waited_s = numbers, dict[int, bytes](), 0.0
        self._limit_s, self._period_s, self._slice_s = limit_s, period_s, slice_s
        self._heard_at = dict.fromkeys(numbers, 0.0)
        self._at, self._next_look_s, self._next_tell_s = time.monotonic(), period_s, min(TELL_S, limit_s / 4)

    def looks(self) -> bool:
        """Count the time since it was asked last; whether it is time to look for signs."""
        now = time.monotonic()
        self.waited_s += min(now - self._at, 2 * self._slice_s)
        self._at = now
        if self.waited_s < self._next_look_s:
            return False
        self._next_look_s = self.waited_s + self._period_s
        return True

    def heard(self, signs: Mapping[int, bytes]) -> bool:
        """Take note of the signs that there are; whether there is a new one."""
        new = [number for number, sign in signs.items() if self.signs.get(number) != sign]
        for number in new:
            self.signs[number], self._heard_at[number] = signs[number], self.waited_s
        return bool(new)

    def lost(self, came: Mapping[int, bytes]) -> list[int]:
        """Those that are silent for too long, and have not come."""
        return [
            number
            for number in self.numbers
            if number not in came and self.waited_s - self._heard_at[number] >= self._limit_s
        ]

    def is_to_tell(self) -> bool:
        """Whether it is time to say who is waited for."""
        if self.waited_s < self._next_tell_s:
            return False
        self._next_tell_s = self.waited_s + TELL_S
        return True
