"""Content of an overwritten checkpoint: own files of a checkpointable, a run, damage."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt_train as jct

RUN = {"w": np.arange(3)}


class OwnFiles:
    """A checkpointable that writes a file in a folder, and an empty folder."""

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            path = await directory.await_creation()
            (path / "inner").mkdir()
            (path / "empty").mkdir()
            (path / "inner" / "own.bin").write_bytes(b"own")

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        raise NotImplementedError


def begin_run(directory: Path) -> None:
    with jct.StepManager(directory) as manager:
        manager.save(1, {"state": RUN}, force=True)


def damage(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "manifest.json").read_bytes())
    data[data.index(b'"parts"') + 1] ^= 1
    (checkpoint / "manifest.json").write_bytes(data)
