"""What an operation on a checkpoint's tree is."""

from __future__ import annotations

import abc
import re
from typing import ClassVar

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.surgery.leaves import Leaves
from jaxckpt_train.surgery.names import check_pattern
from jaxckpt_train.value_checks import nearest

Change = tuple[str, str]
"""What was, and what is instead of it, as text."""


class Operation(abc.ABC):
    """One change of a tree."""

    name: ClassVar[str]
    """In YAML and on the command line."""

    @abc.abstractmethod
    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """Change the leaves; nothing is read. What has changed, as text.

        Raises:
            MismatchError: it does not fit them; the message begins with `subject`.
        """

    def _check_patterns(self, *fields: str) -> None:
        for field in fields:
            check_pattern(f"{self.name}: {field}", getattr(self, field))


def check_dtype(subject: str, name: object) -> None:
    """Raise SettingsError, with the one that may be meant, unless it is the name of a dtype."""
    if name in DTYPES:
        return
    short = re.fullmatch("(bf|fp|f)([0-9]+)", str(name))
    meant = f"{'bfloat' if short[1] == 'bf' else 'float'}{short[2]}" if short else ""
    hint = f', did you mean "{meant}"?' if meant in DTYPES else nearest(name, DTYPES)
    raise SettingsError(f'{subject}: expected the name of a dtype such as "bfloat16", found {name!r}{hint}')


def whole_number(subject: str, value: object, *, least: int | None = None) -> int:
    """The value, or SettingsError if it is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise SettingsError(
            f"{subject}: expected a whole number{'' if least is None else f' from {least}'}, found {value!r}"
        )
    return value


def axis_of(axis: int, dimensions: int, name: str, subject: str) -> int:
    """An axis counted from the first one, or MismatchError if a leaf with so many has none such."""
    if not -dimensions <= axis < dimensions:
        raise MismatchError(f"{subject}: leaf {name!r} has {dimensions} axes, expected one with axis {axis}")
    return axis % dimensions
