"""What a program was promised by its saves, and whether what a crash left keeps it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.pytree import JsonValue

SIZES = (1, 700, 1024, 1500)


@dataclasses.dataclass(frozen=True)
class Promise:
    """One save: the operations that were done before it began, and until it was acknowledged (None: it was not)."""

    token: int
    step: int
    begun: int
    acknowledged: int | None = None


@dataclasses.dataclass
class Facts:
    """All that a program was promised, oldest first.

    Attributes:
        keep: so many steps are kept; None: all.
        rolled_back: whether it ever went back to an older step, so that retention may take more.
        pins: steps that were pinned, and after how many operations that was acknowledged.
    """

    keep: int | None = None
    rolled_back: bool = False
    promises: list[Promise] = dataclasses.field(default_factory=list)
    pins: dict[int, int] = dataclasses.field(default_factory=dict)

    def begin(self, step: int, at: int) -> Promise:
        """A save begins; its number is what its content is made of."""
        promise = Promise(max((each.token for each in self.promises), default=0) + 1, step, at)
        self.promises.append(promise)
        return promise

    def acknowledge(self, promise: Promise, at: int) -> None:
        """It is acknowledged."""
        index = self.promises.index(promise)
        self.promises[index] = dataclasses.replace(promise, acknowledged=at)

    def until(self, moment: int) -> Facts:
        """What had been promised after so many operations, as of a machine that starts then."""
        promises = [
            Promise(
                each.token, each.step, 0, 0 if each.acknowledged is not None and each.acknowledged <= moment else None
            )
            for each in self.promises
            if each.begun <= moment
        ]
        pins = {step: 0 for step, at in self.pins.items() if at <= moment}
        return Facts(self.keep, self.rolled_back, promises, pins)

    def acknowledged(self) -> list[Promise]:
        """Those that were acknowledged, oldest first."""
        return [each for each in self.promises if each.acknowledged is not None]

    def must_be_there(self, newest_token: int) -> dict[int, int]:
        """Steps that can be restored, and of each the oldest save that it may be of.

        Args:
            newest_token: of the save that is restored without asking for a step: later ones were never committed.
        """
        last = {each.step: each.token for each in self.acknowledged()}
        committed = [each for each in self.promises if each.token <= newest_token]
        newest = list(dict.fromkeys(each.step for each in reversed(committed)))
        kept = newest if self.keep is None else newest[: self.keep]
        if self.rolled_back:
            kept = []
        return {step: last[step] for step in [*kept, *self.pins] if step in last}


def state_of(token: int) -> dict[str, Any]:
    """What a save saves: arrays of all sizes and a position, all of them told by its number."""
    return {"state": dict(_arrays_of(token)), "data": JsonValue({"position": token})}


@functools.lru_cache(maxsize=1024)
def _arrays_of(token: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(token)
    return {f"w{size}": chance.standard_normal(size).astype(np.float32) for size in SIZES}


def token_of(restored: dict[str, Any]) -> int:
    """Which save this is what was saved by.

    Raises:
        AssertionError: it is a mixture, or of none.
    """
    token = restored["data"].value["position"]
    expected = _arrays_of(token)
    assert restored["state"].keys() == expected.keys(), f"arrays {sorted(restored['state'])} of save {token}"
    for name, array in expected.items():
        assert np.asarray(restored["state"][name]).tobytes() == array.tobytes(), f"{name} is not that of save {token}"
    return int(token)
