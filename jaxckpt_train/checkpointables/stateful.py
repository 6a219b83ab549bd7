"""The handler of Orbax's StatefulCheckpointable protocol: objects that write and read their own files."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jaxckpt_train.checkpointables.base import Saved, Staged
from jaxckpt_train.errors import CheckpointError, MismatchError

T = TypeVar("T")


class DirectoryAwaitingCreation:
    """The directory that an object's `save` receives. It exists once the returned awaitable runs."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
            CheckpointError: it does not exist yet.
        """
        if self._path is None:
            raise CheckpointError(
                "save(directory) used its directory before it returned; use it in the awaitable that it returns"
            )
        return self._path

    async def await_creation(self) -> Path:
        """Return the directory; see `path`."""
        return self.path

    def created(self, path: Path) -> None:
        """Set the path of the created directory."""
        self._path = path


class StatefulHandler:
    """The handler of objects with `async save(directory)` and `async load(directory)`, which return awaitables."""

    kind = "stateful"
    early = True

    def handles(self, value: object) -> bool:
        """Return whether the value has both coroutine methods."""
        return not inspect.isclass(value) and all(
            inspect.iscoroutinefunction(getattr(value, method, None)) for method in ("save", "load")
        )

    def stage(self, value: Any) -> Staged:
        """Run `save` until it returns the awaitable, which writes the files in the background."""
        directory = DirectoryAwaitingCreation()
        background = run_coroutine(value.save(directory))

        def write(path: Path) -> None:
            directory.created(path)
            run_coroutine(_finish(background))

        if inspect.iscoroutine(background):  # a save that fails early never awaits it
            weakref.finalize(write, background.close).atexit = False
        return Staged(write_files=write)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Run `load` of the target and the awaitable that it returns, and return the target."""
        if target is None or not self.handles(target):
            raise MismatchError(
                f"{saved.name!r}: saved by an object that reads its own files; pass such an object as the target"
            )
        path = saved.directory()

        async def load() -> None:
            await _finish(await target.load(path))

        run_coroutine(load())
        return target


async def _finish(background: Awaitable[None] | None) -> None:
    if background is not None:
        await background


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. If this thread already runs an event loop, use another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001  # the future raises it in the caller
            result.set_exception(error)

    threading.Thread(target=run, name="jaxckpt-stateful", daemon=True).start()
    return result.result()
