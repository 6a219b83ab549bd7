"""Reads operations from plain data, as YAML, JSON and the command line give them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.surgery.adding import Add
from jaxckpt_train.surgery.averaging import Average
from jaxckpt_train.surgery.joining import Fuse, Split, Stack, Unstack
from jaxckpt_train.surgery.naming import Copy, Drop, Nest, Rename
from jaxckpt_train.surgery.operation import Operation
from jaxckpt_train.surgery.reforming import Cast, Pad, Reshape, Transpose, Truncate
from jaxckpt_train.value_checks import known_keys, nearest, shown

_NAMING, _JOINING = (Rename, Nest, Drop, Copy), (Stack, Unstack, Split, Fuse)
_REFORMING, _MAKING = (Transpose, Reshape, Cast, Pad, Truncate), (Add, Average)
OPERATIONS: dict[str, type[Any]] = {each.name: each for each in (*_NAMING, *_JOINING, *_REFORMING, *_MAKING)}

_SIZES = {"axes", "shape", "sizes"}  # of whole numbers, which may be none: () or []
_LISTS = _SIZES | {"into", "with"}
_TEXTS = {"leaves", "from", "to", "leaf", "dtype", "separator"}


def operations_of(subject: str, given: object, in_all: int | None = None) -> tuple[Operation, ...]:
    """Operations, or mappings such as `{"op": "rename", "leaves": "a/**", "to": "b/**"}`, in their order.

    Args:
        subject: what gives them.
        given: they.
        in_all: how many there are with those that come after them; None: no more.

    Raises:
        SettingsError: one is no operation, or has other arguments than it takes; the message begins with `subject`.
    """
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise SettingsError(f"{subject}: expected a list of operations, found {shown(given)}")
    return tuple(
        _operation_of(f"{subject}: {place_of(number, in_all or len(given))}", each)
        for number, each in enumerate(given, 1)
    )


def place_of(number: int, in_all: int) -> str:
    """Which of several operations one is, in the same words everywhere."""
    return f"operation {number} of {in_all}"


def _operation_of(subject: str, given: object) -> Operation:
    if isinstance(given, Operation):
        return given
    if not isinstance(given, Mapping) or "op" not in given:
        raise SettingsError(
            f'{subject}: expected an operation such as {{"op": "drop", "leaves": "head/**"}}, found {shown(given)}'
        )
    name = given["op"]
    kind = OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SettingsError(
            f"{subject}: op: expected one of {', '.join(OPERATIONS)}, found {name!r}{nearest(name, OPERATIONS)}"
        )
    fields = {
        field.name.removesuffix("_"): field for field in dataclasses.fields(kind)
    }  # from_ and with_, as from and with are keywords
    arguments = known_keys(
        f"{subject} ({name})", {key: value for key, value in given.items() if key != "op"}, tuple(fields)
    )
    missing = [
        field for field, each in fields.items() if each.default is dataclasses.MISSING and field not in arguments
    ]
    if missing:
        raise SettingsError(f"{subject} ({name}): expected {', '.join(missing)}")
    try:
        operation: Operation = kind(**{fields[name].name: value for name, value in arguments.items()})
    except SettingsError as error:
        raise SettingsError(f"{subject} ({name}): {str(error).removeprefix(f'{name}: ')}") from error
    except TypeError as error:
        raise SettingsError(f"{subject} ({name}): {error}") from error
    return operation


def parse_operation(text: str, number: int = 1, in_all: int = 1) -> Operation:
    """One operation as the command line gives it: `rename a/** b/**`, `cast ** bfloat16`, `stack l/{} l axis=1`, JSON.

    What follows the name are its arguments in order, or `name=value`; lists are written with commas, numbers also in
    brackets, and none of them is `[]` or `()`.

    Args:
        text: it.
        number: which one it is, from 1.
        in_all: of how many.

    Raises:
        SettingsError: it is none.
    """
    subject = f"{text!r}: {place_of(number, in_all)}"
    if text.lstrip().startswith("{"):
        try:
            return _operation_of(subject, msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise SettingsError(f"{subject}: not JSON: {error}") from error
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{subject}: {error}") from error
    kind = OPERATIONS.get(words[0]) if words else None
    if kind is None:
        name = words[0] if words else ""
        raise SettingsError(
            f"{subject}: expected one of {', '.join(OPERATIONS)}, found {name!r}{nearest(name, OPERATIONS)}"
        )
    return _operation_of(subject, {"op": kind.name, **_arguments(f"{subject} ({kind.name})", kind, words[1:])})


def _arguments(subject: str, kind: type[Any], words: Sequence[str]) -> dict[str, Any]:
    fields = [field.name.removesuffix("_") for field in dataclasses.fields(kind)]
    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name not in fields and (hint := nearest(name, fields)):
            raise SettingsError(f'{subject}: unknown argument "{name}"{hint} It takes {", ".join(fields)}')
        if not equals or name not in fields:
            if place >= len(fields):
                raise SettingsError(f"{subject}: expected at most {len(fields)} arguments: {', '.join(fields)}")
            name, value = fields[place], word
        if name in given:
            before, again = given[name], _value(name, value)
            raise SettingsError(f"{subject}: {name}: expected it once, found {before!r} and then {again!r}")
        given[name] = _value(name, value)
    return given


def _value(name: str, text: str) -> Any:
    """An argument: a list where it is one, a number where it looks like one, else text."""
    if name in _SIZES and text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip().removesuffix(",")
        if not text:
            return []
    if name in _LISTS or "," in text:
        return [_single(each) for each in text.split(",")]
    return text if name in _TEXTS else _single(text)


def _single(text: str) -> Any:
    if text.lower() in ("none", "null", ""):
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
