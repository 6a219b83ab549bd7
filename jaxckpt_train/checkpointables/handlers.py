"""The handlers of checkpointables, and the registry that finds the handler for a value."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, Handler, JsonValue, Saved, Staged
from jaxckpt_train.checkpointables.grain import GrainHandler
from jaxckpt_train.checkpointables.iterator_state import PerProcess, own_value, stage_own
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CheckpointError, MismatchError, SettingsError, UnsupportedLeafError
from jaxckpt_train.pytree.leaves import refuse_too_deep

T = TypeVar("T")
_registered: list[_Registered] = []


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


class _PerProcessHandler:
    """The handler of `PerProcess`."""

    kind = "per_process"
    early = True

    def handles(self, value: object) -> bool:
        return isinstance(value, PerProcess)

    def is_current(self, value: PerProcess) -> bool:
        return False

    def stage(self, value: PerProcess) -> Staged:
        return stage_own(value.value)

    def restore(self, target: Any, saved: Saved) -> PerProcess:
        return PerProcess(own_value(saved, is_wanted=target is not None))


class _GetSetStateHandler:
    """The handler of objects with `get_state()` and `set_state(state)`.

    In a multi-process job, states of plain data may differ between processes; arrays on devices may not.
    """

    kind = "get_set_state"
    early = True

    def handles(self, value: object) -> bool:
        return not inspect.isclass(value) and all(callable(getattr(value, m, None)) for m in ("get_state", "set_state"))

    def stage(self, value: Any) -> Staged:
        state = value.get_state()
        if current().processes > 1:
            with contextlib.suppress(UnsupportedLeafError):
                return stage_own(state)
        return Staged(tree=state)

    def restore(self, target: Any, saved: Saved) -> Any:
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
        """The directory. Raises CheckpointError if it does not exist yet."""
        if self.created is None:
            raise CheckpointError(
                "save(directory) used its directory before it returned; use it in the awaitable that it returns"
            )
        return self.created

    async def await_creation(self) -> Path:
        """Return the directory; see `path`."""
        return self.path


class _StatefulHandler:
    """The handler of objects with `async save(directory)` and `async load(directory)`, which return awaitables."""

    kind = "stateful"
    early = True

    def handles(self, value: object) -> bool:
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


_OWN = (GrainHandler(), JsonHandler(), _PerProcessHandler(), _StatefulHandler(), _GetSetStateHandler())
_PYTREE = PytreeHandler()


class _Registered:
    """A user's handler, bound to the type that it was registered for."""

    def __init__(self, taken: type, handler: Any) -> None:
        self._taken, self._handler = taken, handler
        self.kind: str = getattr(handler, "kind", f"{taken.__module__}.{taken.__qualname__}")
        self.early: bool = getattr(handler, "early", False)
        self.restores: tuple[str, ...] = getattr(handler, "restores", ())
        self.compare: Callable[[Any, Saved], None] | None = getattr(handler, "compare", None)

    def handles(self, value: object) -> bool:
        return isinstance(value, self._taken)

    def stage(self, value: Any) -> Staged:
        staged = self._handler.stage(value)
        if not isinstance(staged, Staged):
            raise SettingsError(f"handler of {self.kind}: stage must return jaxckpt_train.Staged, found {staged!r}")
        return staged

    def restore(self, target: Any, saved: Saved) -> Any:
        return self._handler.restore(target, saved)


def register_handler(taken: type, handler: Any) -> None:
    """Register how objects of a type are saved and loaded. The newest registration that fits an object is used.

    Args:
        taken: the type. Instances of its subclasses are included.
        handler: an object with `stage(value) -> Staged` and `restore(target, saved) -> value`; see
            `jaxckpt_train.checkpointables.base`. Optional attributes are `kind` (text recorded in the checkpoint, by
            which a load without a target finds the handler; the default is the type's name), `restores`, `early` and
            `compare`.

    Raises:
        SettingsError: `taken` is not a type, or the handler has a method missing.
    """
    if not isinstance(taken, type):
        raise SettingsError(f"register_handler: expected a type, found {taken!r}")
    for method in ("stage", "restore"):
        if not callable(getattr(handler, method, None)):
            raise SettingsError(f"register_handler: the handler of {taken.__name__} has no method {method}()")
    _registered.insert(0, _Registered(taken, handler))


def _handlers() -> list[Handler]:
    """Return all handlers in order of precedence, with that of Flax once the program has imported Flax."""
    flax: list[Handler] = []
    if "flax" in sys.modules:
        from jaxckpt_train.checkpointables.nnx import NnxHandler

        flax = [NnxHandler()]
    return [*_registered, *flax, *_OWN, _PYTREE]


def handler_of(value: object) -> Handler:
    """Return the handler that accepts a value, as something to save or as a target."""
    refuse_too_deep("the tree", value)
    return next(handler for handler in _handlers() if handler.handles(value))


def keeps_itself_current(value: object) -> bool:
    """Return whether a value changes in place, as objects do and pytrees of arrays do not."""
    handler = handler_of(value)
    is_current = getattr(handler, "is_current", None)
    return handler.kind != _PYTREE.kind if is_current is None else bool(is_current(value))


def is_tree_in_place(value: object) -> bool:
    """Return whether a value is a tree whose arrays are replaced in place, like those of NNX objects."""
    return keeps_itself_current(value) and handler_of(value).kind == _PYTREE.kind


def is_grain_iterator(value: object) -> bool:
    """Return whether a value is a Grain iterator for which the user has not registered a handler."""
    return isinstance(handler_of(value), GrainHandler)


def _kinds_of(handler: Handler) -> tuple[str, ...]:
    """Return the kinds that a handler restores, its own first."""
    return handler.kind, *getattr(handler, "restores", ())


def handler_for_load(target: object, kind: str, name: str) -> Handler:
    """Return the handler that restores a kind into a target, or the handler of the kind without a target."""
    if target is None:
        for handler in [_PYTREE, *_handlers()]:
            if kind in _kinds_of(handler):
                return handler
        raise MismatchError(
            f"checkpointable {name!r}: no handler is registered for its kind {kind!r}; register one "
            "(jaxckpt_train.register_handler), or omit it from the load"
        )
    handler = handler_of(target)
    if kind not in _kinds_of(handler):
        found = f"{type(target).__name__} ({handler.kind!r})"
        raise MismatchError(f"checkpointable {name!r}: saved as {kind!r}, but the target is a {found}")
    return handler
