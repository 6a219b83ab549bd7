"""The subjects of the goodput benchmark: which library keeps a training, by which policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from benchmarks.lm_training import LmTraining

NOTHING = "nothing"
SUBJECTS = {
    "ours_fixed": True,
    "ours_seconds": True,
    "ours_budget": True,
    "ours_young_daly": True,
    "orbax_v0": True,
    "orbax_v0_compressed": False,
    "orbax_v0_no_ocdbt": False,
    "orbax_v0_continuous": True,
    "orbax_v0_back_to_back": False,
    "orbax_v1": True,
    "orbax_v1_no_ocdbt": False,
    "orbax_v1_default": False,
}
"""All subjects, and whether they have a turn if nothing else is asked for."""
INTERVALS = {
    "ours_seconds": "ours_fixed",
    "ours_budget": "ours_fixed",
    "ours_young_daly": "ours_fixed",
    "orbax_v0_continuous": "orbax_v0",
    "orbax_v0_back_to_back": "orbax_v0",
    "orbax_v1_default": "orbax_v1",
}
"""The subjects whose interval is measured by saves at a fixed number of updates."""
GRACE_S = 8.0
ENDLESS = 10**9  # updates: a run ends when its time is up
KEEP = 2  # checkpoints


@dataclasses.dataclass(frozen=True)
class Interval:
    """The interval of subjects that need one: that of Young and Daly for the cost of their save."""

    steps: int
    seconds: float


class Keeper(Protocol):
    """A checkpoint library in a loop. Entered before the model is built, as a request to leave may come early."""

    def __enter__(self) -> Keeper: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def resume(self, training: LmTraining) -> int:
        """Restore the newest checkpoint into the training, if there is one; the completed updates."""

    def steps(self) -> Iterator[int]:
        """The numbers of the updates to do, until the job is asked to leave."""

    def completed(self, training: LmTraining, number: int, loss: Any) -> None:
        """This many updates are complete: save if a save is due."""


class Nothing:
    """The control: a loop without checkpoints."""

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *raised: object) -> None:
        """It has nothing to end."""

    def resume(self, training: LmTraining) -> int:
        return 0

    def steps(self) -> Iterator[int]:
        return iter(range(ENDLESS))

    def completed(self, training: LmTraining, number: int, loss: Any) -> None:
        """It keeps nothing."""


class Ours:
    """The loop of the README, with a policy."""

    def __init__(self, directory: Path, policy: Any, grace_s: float) -> None:
        import jaxckpt_train as jct

        self._callback = jct.CheckpointCallback(
            directory, save_policy=policy, keep_latest=KEEP, grace_period_s=grace_s, progress=False
        )

    def __enter__(self) -> Ours:
        self._callback.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._callback.__exit__(kind, error, trace)

    def resume(self, training: LmTraining) -> int:
        _, training.data = self._callback.resume((training.model, training.optimizer), training.data)
        return self._callback.completed_steps

    def steps(self) -> Iterator[int]:
        return self._callback.steps(ENDLESS)

    def completed(self, training: LmTraining, number: int, loss: Any) -> None:
        self._callback(metrics={"loss": loss})
