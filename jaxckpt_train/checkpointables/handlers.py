"""The handlers of pytrees, of JSON values, and of objects with the methods of `StatefulCheckpointable`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, Json, Saved, Staged
from jaxckpt_train.checkpointables.iterator_state import own_value, stage_own
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CheckpointError, MismatchError, UnsupportedLeafError

T = TypeVar("T")


class PytreeHandler:
    """The handler of pytrees, and of everything that no other handler accepts."""

    kind = "pytree"
    early = False

    def handles(self, value: object) -> bool:
        """Return True."""
        return True

    def stage(self, value: Any) -> Staged:
        """Stage the tree itself."""
        return Staged(tree=value)

    def tree_of(self, target: Any) -> Any:
        """Return the tree that `restore` loads."""
        return target

    def compare(self, target: Any, saved: Saved) -> None:
        """Raise an error with all differences to the target."""
        saved.compare(target)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Return the stored leaves in the structure of the target."""
        return saved.tree(target)


@dataclasses.dataclass(frozen=True)
class JsonValue:
    """Marks plain data that is stored as a JSON file: None, bool, int, float, str, lists, and dicts with text keys.

    Unlike a pytree, it is loaded as it was saved, even if its structure has changed since. Use it for configurations
    and notes. As the target of a load, pass `JsonValue(None)` or None. NaN and infinities are preserved.
    """

    value: Json


class JsonHandler:
    """The handler of `JsonValue`."""

    kind = "json"
    restores = (ORBAX_GRAIN,)  # as plain data, if there is no iterator to set
    early = True

    def handles(self, value: object) -> bool:
        """Return whether the value is marked as JSON."""
        return isinstance(value, JsonValue)

    def stage(self, value: JsonValue) -> Staged:
        """Stage the data; it is encoded before the call to save returns."""
        return Staged(value=value.value)

    def restore(self, target: Any, saved: Saved) -> JsonValue:
        """Return the data, marked as JSON again."""
        return JsonValue(saved.value())


class GetSetStateHandler:
    """The handler of objects with `get_state()` and `set_state(state)`.

    The state is any pytree, and is restored without a target. In a multi-process job each process has its own state,
    like that of an iterator. Plain data may differ between processes; arrays on devices may not.
    """

    kind = "get_set_state"
    early = True

    def handles(self, value: object) -> bool:
        """Return whether the value has both methods."""
        return not inspect.isclass(value) and all(callable(getattr(value, m, None)) for m in ("get_state", "set_state"))

    def stage(self, value: Any) -> Staged:
        """Stage the current result of `get_state`."""
        state = value.get_state()
        if current().processes > 1:
            with contextlib.suppress(UnsupportedLeafError):
                return stage_own(state)
        return Staged(tree=state)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Call `set_state` on the target and return it; return the state itself without a target."""
        state = own_value(saved, is_wanted=target is not None) if saved.values else saved.tree(None)
        if target is None:
            return state
        target.set_state(state)
        return target


class DirectoryAwaitingCreation:
    """The directory that an object's `save` receives. It exists once the returned awaitable runs."""

    def __init__(self) -> None:
        self.created: Path | None = None  # set once it exists

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
            CheckpointError: it does not exist yet.
        """
        if self.created is None:
            raise CheckpointError(
                "save(directory) used its directory before it returned; use it in the awaitable that it returns"
            )
        return self.created

    async def await_creation(self) -> Path:
        """Return the directory; see `path`."""
        return self.path


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
            directory.created = path
            run_coroutine(_finish(background))

        if inspect.iscoroutine(background):  # a save that fails early never awaits it
            weakref.finalize(write, background.close).atexit = False
        return Staged(write_files=write)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Run `load` of the target and the awaitable that it returns, and return the target."""
        if target is None:
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
