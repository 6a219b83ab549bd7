"""The parts that Orbax's tests need in addition to the manager: private attributes, and a checkpointer of Orbax.

No value depends on the test: each comes from the manager or from the disk.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxckpt_train.integrations.orbax_manager import CheckpointManager


class ObservedManager(CheckpointManager):
    """The manager, with the private attributes of Orbax's that its tests read."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more, clock=_replaceable_now)

    @property
    def _default_item(self) -> Any:
        """Whether there is one item without a name; None: unknown so far."""
        return SimpleNamespace(get=lambda: self._items.is_single)

    @property
    def _checkpoints(self) -> list[Any]:
        """The existing steps with their times and metrics."""
        return [_Checkpoint(info.step, info.time, info.metrics) for info in self._steps.infos()]

    def _root_metadata_file_path(self) -> Path:
        folder = self.directory / "metadata"
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such directory")
        return folder / "_ROOT_METADATA"


@dataclasses.dataclass
class _Checkpoint:
    step: int
    time: datetime.datetime
    metrics: Mapping[str, Any] | None


_real_datetime = datetime.datetime


def _replaceable_now() -> datetime.datetime:
    """Return the time of `datetime.datetime`, or the real time if a test replaced that by a mock without one."""
    now = datetime.datetime.now(datetime.UTC)
    return now if isinstance(now, _real_datetime) else _real_datetime.now(datetime.UTC)


def checkpointer_of(base: Any, args_module: Any) -> Any:
    """Return Orbax's checkpointer, which also accepts args of this package and converts them to its own."""

    class Checkpointer(base):  # type: ignore[misc]
        def save(self, directory: Any, *given: Any, args: Any = None, **more: Any) -> None:
            theirs = None if args is None else getattr(args_module, type(args).__name__)(**vars(args))
            super().save(directory, *given, **({} if theirs is None else {"args": theirs}), **more)

    return Checkpointer
