"""The kinds of broken promises, so that a control can assert which promise its flaw breaks."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal[
    "lost",  # an acknowledged or durable save is not restored
    "damaged",  # a listed step cannot be restored
    "wrong bytes",
    "deleted",  # a step that must be kept is gone
    "not pinned",
    "not deleted",  # an expired step is still there
    "left over",
    "exception",
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A broken promise: its kind, and what was found."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
