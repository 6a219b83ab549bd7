"""The promises made to a program by its saves, and what must be restored after a crash."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.base import JsonValue

SIZES = (1, 700, 1024, 1500)


@dataclasses.dataclass(frozen=True)
class Promise:
    """One save: the numbers of operations before its begin and until its acknowledgement (None: not acknowledged).

    Attributes:
        goes_on_from: the token of the save that the process restored or made before; 0: none.
    """

    token: int
    step: int
    begun: int
    acknowledged: int | None = None
    goes_on_from: int = 0

    def until(self, moment: int) -> Promise:
        """Return the promise as seen by a machine that starts after `moment` operations."""
        is_acknowledged = self.acknowledged is not None and self.acknowledged <= moment
        return dataclasses.replace(self, begun=0, acknowledged=0 if is_acknowledged else None)


@dataclasses.dataclass
class Facts:
    """All promises made to a program, oldest first.

    Attributes:
        keep: the number of steps that are kept; None: all.
        rolled_back: whether the program went back to an older step, so that retention may delete more.
        pins: pinned steps, and the number of operations until the pin was acknowledged.
        durable: saves that are known to be on the disk, and the number of operations until they were.
        contents: digests of the directories of acknowledged saves.
        restored: the save that the check after a crash has restored.
    """

    keep: int | None = None
    rolled_back: bool = False
    promises: list[Promise] = dataclasses.field(default_factory=list)
    pins: dict[int, int] = dataclasses.field(default_factory=dict)
    durable: dict[int, int] = dataclasses.field(default_factory=dict)
    contents: dict[int, bytes] = dataclasses.field(default_factory=dict, repr=False)
    restored: int = 0

    def begin(self, step: int, at: int, goes_on_from: int = 0) -> Promise:
        """Record the begin of a save; its token determines its content."""
        token = max((each.token for each in self.promises), default=0) + 1
        promise = Promise(token, step, at, goes_on_from=goes_on_from)
        self.promises.append(promise)
        return promise

    def acknowledge(self, promise: Promise, at: int) -> None:
        """Record the acknowledgement of a save."""
        index = self.promises.index(promise)
        self.promises[index] = dataclasses.replace(promise, acknowledged=at)

    def until(self, moment: int) -> Facts:
        """Return the promises after `moment` operations, as seen by a machine that starts then."""
        promises = [each.until(moment) for each in self.promises if each.begun <= moment]
        pins = {step: 0 for step, at in self.pins.items() if at <= moment}
        durable = {token: 0 for token, at in self.durable.items() if at <= moment}
        return Facts(self.keep, self.rolled_back, promises, pins, durable, self.contents)

    def acknowledged(self) -> list[Promise]:
        """Return the acknowledged promises, oldest first."""
        return [each for each in self.promises if each.acknowledged is not None]

    def must_be_there(self, newest_token: int) -> dict[int, int]:
        """Return the steps that must be restorable, and for each the oldest save that it may hold.

        Args:
            newest_token: the token of the save that is restored by default; later saves were never committed.
        """
        last = {each.step: each.token for each in self.acknowledged()}
        committed = [each for each in self.promises if each.token <= newest_token]
        newest = list(dict.fromkeys(each.step for each in reversed(committed)))
        kept = newest if self.keep is None else newest[: self.keep]
        if self.rolled_back:
            return self._pinned_on_the_line_of(newest_token)
        return {step: last[step] for step in [*kept, *self.pins] if step in last}

    def _pinned_on_the_line_of(self, token: int) -> dict[int, int]:
        """Return the pinned steps for a run on the lineage of a save; saves on other lineages are abandoned."""
        line = {*self._line(token)}
        oldest = {each.step: each.token for each in self.acknowledged() if each.token in line}
        return {step: oldest.get(step, 0) for step in self.pins}

    def may_be_restored(self, token: int) -> bool:
        """Return whether no newer save is known to be on the disk.

        An incomplete save may still record its predecessor, and thus that saves in between were abandoned; it is no
        older than the newest durable save.
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
        """Return the lineage of a save, newest first, down to the newest durable save."""
        return list(itertools.takewhile(lambda token: token not in self.durable, self._line(tip)))

    def _newest_from(self, tip: int) -> int | None:
        return next((token for token in self._line(tip) if token in self.durable), None)


class WrongContentError(AssertionError):
    """The restored content is of no save, or of several."""


def state_of(token: int) -> dict[str, Any]:
    """Return the content of a save, determined by its token: arrays that change, or do not, and a position."""
    return {"state": dict(_arrays_of(token)), "data": JsonValue({"position": token})}


@functools.lru_cache(maxsize=1024)
def _arrays_of(token: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(token)
    arrays = {f"w{size}": chance.standard_normal(size).astype(np.float32) for size in SIZES}
    return arrays | {"never": np.arange(1000, dtype=np.float32), "rarely": np.full(9, token // 4, np.float32)}


def token_of(restored: dict[str, Any]) -> int:
    """Return the token of the save that has this content.

    Raises:
        WrongContentError: it is of no save, or of several.
    """
    token = restored["data"].value["position"]
    expected = _arrays_of(token)
    if restored["state"].keys() != expected.keys():
        raise WrongContentError(f"arrays {sorted(restored['state'])} of save {token}")
    for name, array in expected.items():
        if np.asarray(restored["state"][name]).tobytes() != array.tobytes():
            raise WrongContentError(f"{name} is not that of save {token}")
    return int(token)
