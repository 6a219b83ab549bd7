"""Has typer hand on what needs no conversion: for any other it imports pydantic, a fifth of a command's start."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_PLAIN = (str, int, float)
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # in other forms they are left to typer, as is what is no number


class PlainCommand(TyperCommand):
    """A command that has only those values converted that are not of the types of their parameters already.

    Text is, and so are defaults, and what is not given; a whole number takes no library either. A typer that converts
    in another way than from 0.29 on is left alone; it imports no pydantic.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """As click's."""
        return [_taken(each) for each in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """As `PlainCommand`, of a group."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As click's."""
        return [_taken(each) for each in super().get_params(ctx)]


class _Conversion:
    """What converts the values of a parameter."""

    def __init__(self, parameter: Any) -> None:
        self._annotation, self._get_other = parameter.type_descriptor.annotation, parameter.get_runtime_param
        self._least, self._most = (getattr(parameter.type_descriptor.parameter_info, each) for each in ("min", "max"))
        self._is_several = bool(parameter.multiple) or parameter.nargs == -1

    def coerce(self, value: Any, **context: Any) -> Any:
        """As typer's: the value as the parameter has it."""
        if value is None:
            return () if self._is_several else None
        if self._annotation in _PLAIN and type(value) is self._annotation:
            return value
        if self._annotation == list[str] and isinstance(value, list | tuple) and all(type(e) is str for e in value):
            return [*value]
        if self._annotation is int and isinstance(value, str) and _WHOLE.fullmatch(value) and self._allows(int(value)):
            return int(value)
        return self._get_other().coerce(value, **context)

    def _allows(self, number: int) -> bool:
        return (self._least is None or number >= self._least) and (self._most is None or number <= self._most)


def _taken(parameter: Any) -> Any:
    is_known = hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor")
    if is_known and "get_runtime_param" not in vars(parameter):
        conversion = _Conversion(parameter)
        parameter.get_runtime_param = lambda: conversion
    return parameter
