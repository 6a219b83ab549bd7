"""The registry of handlers: it finds the handler for a checkpointable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jaxckpt_train.checkpointables.base import Handler, Saved, Staged
from jaxckpt_train.checkpointables.grain import GrainHandler
from jaxckpt_train.checkpointables.handlers import GetSetStateHandler, JsonHandler, PytreeHandler, StatefulHandler
from jaxckpt_train.checkpointables.iterator_state import PerProcessHandler
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.paths import refuse_too_deep

_OWN = (GrainHandler(), JsonHandler(), PerProcessHandler(), StatefulHandler(), GetSetStateHandler())
_PYTREE = PytreeHandler()
_registered: list[_Registered] = []


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
        raise MismatchError(
            f"checkpointable {name!r}: saved as {kind!r}, "
            f"but the target is a {type(target).__name__} ({handler.kind!r})"
        )
    return handler
