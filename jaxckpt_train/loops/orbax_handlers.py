"""Handlers of Orbax that save and restore in a way of their own: each item writes and reads its own files."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from jaxckpt_train.checkpointables.stateful import DirectoryAwaitingCreation
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.multihost import current


class HandledItem:
    """What a handler saves, or has restored, as an object of the protocol `StatefulCheckpointable`.

    Args:
        handler: Orbax's, or one of a program.
        args: what its `save` or `restore` is given.

    Attributes:
        taken: set once the handler needs what is saved no more.
        restored: what the handler has restored.
    """

    def __init__(self, handler: Any, args: Any) -> None:
        self._handler, self._args = handler, args
        self.taken, self.restored = threading.Event(), None

    async def save(self, directory: DirectoryAwaitingCreation) -> Awaitable[None]:
        """Have the handler save in the background."""
        return self._save(directory)

    async def _save(self, directory: DirectoryAwaitingCreation) -> None:
        folder, writes = _path(await directory.await_creation()), None
        try:
            if hasattr(self._handler, "async_save"):
                writes = await self._handler.async_save(folder, args=self._args)
            else:
                self._handler.save(folder, args=self._args)
        finally:
            self.taken.set()
        for write in writes or ():
            await asyncio.to_thread(write.result)
        self._handler.finalize(folder)

    def give_up(self, _: object) -> None:
        """Say that it is needed no more, as the save has ended: something else may have failed before."""
        self.taken.set()

    async def load(self, directory: Path) -> None:
        """Have the handler restore."""
        self.restored = self._handler.restore(_path(directory), args=self._args)


def _path(directory: Path) -> Any:
    """The directory in the form that Orbax gives it to handlers."""
    return importlib.import_module("etils.epath").Path(directory)


def refuse_many_processes(name: str) -> None:
    """Raise SettingsError in a job of several processes, whose handlers would have to wait for one another."""
    if current().processes > 1:
        raise SettingsError(
            f"args of {name!r}: expected args of Orbax or Grain in a job of several processes, found a handler that "
            "saves in a way of its own: register it by jaxckpt_train.register_handler(type, handler)"
        )


def args_classes(handler: Any) -> tuple[Any, Any]:
    """The classes of args with which a handler saves and restores.

    Raises:
        ValueError: none are registered.
    """
    found: tuple[Any, Any] = importlib.import_module("orbax.checkpoint.checkpoint_args").get_registered_args_cls(
        handler
    )
    return found


def registered_handler_class(args: Any) -> type | None:
    """The class of the handler that a program has registered for args; None: they are not Orbax's, or it has none."""
    known = sys.modules.get("orbax.checkpoint.checkpoint_args")
    if known is None or not isinstance(args, known.CheckpointArgs):
        return None
    try:
        found: type = known.get_registered_handler_cls(args)
    except ValueError:
        return None
    return found
