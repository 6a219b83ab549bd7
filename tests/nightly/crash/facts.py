"""What a program was promised by its saves, and whether what a crash left keeps it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.handlers import JsonValue

SIZES = (1, 700, 1024, 1500)


@dataclasses.dataclass(frozen=True)
class Promise:
    """One save: the operations that were done before it began, and until it was acknowledged (None: it was not).

    Attributes:
        goes_on_from: the number of the save that the process had restored or made last; 0: none.
    """

    token: int
    step: int
    begun: int
    acknowledged: int | None = None
    goes_on_from: int = 0

    def until(self, moment: int) -> Promise:
        """As of a machine that starts after so many operations."""
        is_acknowledged = self.acknowledged is not None and self.acknowledged <= moment
        return dataclasses.replace(self, begun=0, acknowledged=0 if is_acknowledged else None)


@dataclasses.dataclass
class Facts:
    """All that a program was promised, oldest first.

    Attributes:
        keep: so many steps are kept; None: all.
        rolled_back: whether it ever went back to an older step, so that retention may take more.
        pins: steps that were pinned, and after how many operations that was acknowledged.
        durable: saves that are known to be on the disk, and after how many operations they were.
        contents: of acknowledged saves, digests of their directories.
        notes_refused: after how many operations the disk had refused to keep the notes; None: it never did.
        restored: the save that whoever looks after a crash has restored.
    """

    keep: int | None = None
    rolled_back: bool = False
    promises: list[Promise] = dataclasses.field(default_factory=list)
    pins: dict[int, int] = dataclasses.field(default_factory=dict)
    durable: dict[int, int] = dataclasses.field(default_factory=dict)
    contents: dict[int, bytes] = dataclasses.field(default_factory=dict, repr=False)
    restored: int = 0
    notes_refused: int | None = None

    def begin(self, step: int, at: int, goes_on_from: int = 0) -> Promise:
        """A save begins; its number is what its content is made of."""
        token = max((each.token for each in self.promises), default=0) + 1
        promise = Promise(token, step, at, goes_on_from=goes_on_from)
        self.promises.append(promise)
        return promise

    def acknowledge(self, promise: Promise, at: int) -> None:
        """It is acknowledged."""
        index = self.promises.index(promise)
        self.promises[index] = dataclasses.replace(promise, acknowledged=at)

    def until(self, moment: int) -> Facts:
        """What had been promised after so many operations, as of a machine that starts then."""
        promises = [each.until(moment) for each in self.promises if each.begun <= moment]
        pins = {step: 0 for step, at in self.pins.items() if at <= moment}
        durable = {token: 0 for token, at in self.durable.items() if at <= moment}
        refused = 0 if self.notes_refused is not None and self.notes_refused <= moment else None
        return Facts(self.keep, self.rolled_back, promises, pins, durable, self.contents, notes_refused=refused)

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
            return self._pinned_on_the_line_of(newest_token)
        return {step: last[step] for step in [*kept, *self.pins] if step in last}

    def _pinned_on_the_line_of(self, token: int) -> dict[int, int]:
        """A run that goes on from what was left behind leaves behind what had come instead, of the same step, too."""
        line = {*self._line(token)}
        oldest = {each.step: each.token for each in self.acknowledged() if each.token in line}
        return {step: oldest.get(step, 0) for step in self.pins}

    def may_be_restored(self, token: int) -> bool:
        """Whether nothing newer is known to be on the disk.

        A save that is there in part only may still tell which one it went on from, and that what came in between was
        left behind; it is no older than the newest that is known.
        """
        newest = max(self.durable, default=0)
        return any(self._newest_from(tip) == token or token in self._unknown_from(tip) for tip in self._tips(newest))

    def _tips(self, newest: int) -> list[int]:
        return [each.token for each in self.promises if each.token >= newest]

    def _line(self, tip: int) -> Iterator[int]:
        before = {each.token: each.goes_on_from for each in self.promises}
        while tip:
            yield tip
            tip = before.get(tip, 0)

    def _unknown_from(self, tip: int) -> list[int]:
        """The saves that it goes on from, newest first, as far as they are newer than the newest that is known."""
        return list(itertools.takewhile(lambda token: token not in self.durable, self._line(tip)))

    def _newest_from(self, tip: int) -> int | None:
        return next((token for token in self._line(tip) if token in self.durable), None)


class WrongContentError(AssertionError):
    """What was restored is no save, or a mixture."""


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
        WrongContentError: it is a mixture, or of none.
    """
    token = restored["data"].value["position"]
    expected = _arrays_of(token)
    if restored["state"].keys() != expected.keys():
        raise WrongContentError(f"arrays {sorted(restored['state'])} of save {token}")
    for name, array in expected.items():
        if np.asarray(restored["state"][name]).tobytes() != array.tobytes():
            raise WrongContentError(f"{name} is not that of save {token}")
    return int(token)
