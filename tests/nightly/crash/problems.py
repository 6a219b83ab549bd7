"""Problems: the kinds of broken promises, so that a control is found out for the very thing that it takes away."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal[
    "lost",  # an acknowledged save, or one that is known to be on the disk, is not what is restored
    "damaged",  # something is listed that cannot be restored
    "wrong bytes",
    "deleted",  # a step is gone that was to be kept
    "not pinned",
    "not deleted",  # a step stays that nobody keeps
    "left over",
    "exception",
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A promise that was broken: of which kind, and what was found."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
