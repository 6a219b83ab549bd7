"""A data iterator that tells of each element that is taken from it, and is like the one it stands for in all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PASSED_ON = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__len__")


class ObservedData:
    """Stands for `data`; `took` is called with each element before the loop gets it."""

    def __init__(self, data: Any, took: Callable[[Any], None]) -> None:
        self._observed_data, self._observed_took = data, took

    @property  # type: ignore[misc]  # isinstance asks for it
    def __class__(self) -> type:
        """That of the data: for `isinstance` it is one of those."""
        kind: type = type(self._observed_data)
        return kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observed_data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_observed_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._observed_data, name, value)

    def __repr__(self) -> str:
        return repr(self._observed_data)

    def __iter__(self) -> Any:
        iterator = iter(self._observed_data)
        return self if iterator is self._observed_data else observed(iterator, self._observed_took)


def _next(self: ObservedData) -> Any:
    element = next(self._observed_data)
    self._observed_took(element)
    return element


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: ObservedData, *arguments: Any, **named: Any) -> Any:
        return getattr(self._observed_data, name)(*arguments, **named)

    return call


def can_be_observed(data: object) -> bool:
    """Whether a loop can take elements from it: an iterator, or what gives one and has a position."""
    return hasattr(data, "__next__") or (hasattr(data, "__iter__") and hasattr(data, "get_state"))


def observed(data: Any, took: Callable[[Any], None]) -> Any:
    """Something like `data` that calls `took` with each element."""
    special: dict[str, Any] = {name: _passed_on(name) for name in _PASSED_ON if hasattr(type(data), name)}
    if hasattr(type(data), "__next__"):
        special["__next__"] = _next
    return type("ObservedData", (ObservedData,), special)(data, took)


def plain(value: Any) -> Any:
    """What it stands for, if it stands for something."""
    return value._observed_data if issubclass(type(value), ObservedData) else value
