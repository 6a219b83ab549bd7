"""An attribute that is made when it is first asked for, without a lock.

`functools.cached_property` of Python 3.11 has one lock for all objects. A child that is forked while any thread of its
parent makes such an attribute finds it taken for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class made_once(Generic[T]):  # noqa: N801  # as `property`
    """Decorates a method. Threads that ask for the first time at once may all make it; one of what they made stays."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | Self:
        if instance is None:
            return self
        made: T = vars(instance).setdefault(self._name, self._make(instance))
        return made
