"""Events of a history with all their fields; a field that is not what it should be counts as not told."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from jaxckpt_train.steps.run_events import RunEvent


@dataclasses.dataclass(frozen=True)
class Told:
    """One event.

    Attributes:
        event: what all events have, and the fields that goodput is made of.
        fields: all of it, as the history has it; anything may be in there.
    """

    event: RunEvent
    fields: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Such as "save"."""
        return self.event.event

    @property
    def time(self) -> datetime.datetime:
        """When, in UTC."""
        return self.event.time.astimezone(datetime.UTC)

    def before(self, seconds: float) -> datetime.datetime:
        """So many seconds before it."""
        return self.time - datetime.timedelta(seconds=seconds)

    def number(self, name: str) -> float | None:
        """A field that is a number of seconds, bytes or bytes a second, if it was told."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 <= value <= 1e18 and math.isfinite(value) else None

    def count(self, name: str) -> int | None:
        """A field that is a whole number, if it was told."""
        value = self.fields.get(name)
        is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 60
        return value if is_one else None

    def text(self, name: str) -> str:
        """A field that is text; empty if none was told."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that is a list of texts; empty if none was told."""
        value = self.fields.get(name)
        return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def told_events(events: Iterable[Mapping[str, Any]]) -> tuple[list[Told], int]:
    """Those that are events of a run, in their order, and how many are none."""
    found, left_out = [], 0
    for fields in events:
        try:
            found.append(Told(msgspec.convert(fields, RunEvent), fields))
        except msgspec.ValidationError:
            left_out += 1
    return found, left_out
